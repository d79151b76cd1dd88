// What is known: a ring of answers of GET /state, and what follows from one and the one before it.

"use strict";
const { html, render } = htmPreact;
const RING = 300; // answers, a second apart
const POLL_MS = 1000;
const MAX_OLDEST = 50; // machines of a state, and rows of that table: nobody reads more

const edgeKey = (machine, source, target) => `${machine} ${source} ${target}`;

const byName = new Intl.Collator("en", { numeric: true }).compare; // e2 before e10

const linkKey = (one) => `${one.instance} ${one.peer} ${one.transport}`;

/** `flows`: how often each edge was taken per second since `before`. */
function entryOf({ told, query = null, at_ms, note = "", latency = {} }, before) {
  const counts = new Map();
  for (const edge of told.edges) {
    if (edge.reason) continue;
    const key = edgeKey(edge.machine, edge.source, edge.target);
    counts.set(key, (counts.get(key) || 0) + edge.count);
  }
  const flows = new Map();
  const spent_s = before ? (at_ms - before.at_ms) / 1000 : 0;
  if (spent_s > 0)
    for (const [key, count] of counts) {
      const more = count - (before.counts.get(key) || 0);
      if (more > 0) flows.set(key, more / spent_s); // less: a process has gone, with its count
    }
  const nbytes = new Map(told.links.map((one) => [linkKey(one), one.nbytes]));
  const links = told.links.map((one) => {
    const more = one.nbytes - (before?.nbytes.get(linkKey(one)) || 0);
    return { ...one, per_s: spent_s > 0 && more > 0 ? more / spent_s : 0 };
  });
  const entry = { told, query, at_ms, note, latency, counts, flows, nbytes, links };
  entry.series = SERIES.map(([, values]) => values(entry)); // once, not in each frame that draws it
  return entry;
}

/** Of counts or flows by edge. */
function into(edges, machine, target) {
  let sum = 0;
  for (const [key, value] of edges) {
    const [of, source, to] = key.split(" ");
    if (of === machine && to === target && source !== target) sum += value;
  }
  return sum;
}

const numIllegal = (entry) =>
  entry.told.edges.reduce((sum, one) => sum + (one.reason === "illegal" ? one.count : 0), 0);

/** Instances that are over are named by themselves. */
const lateStates = (entry) => entry.told.states
  .filter((one) => one.late && one.machine !== "INSTANCE").sort((a, b) => b.oldest_s - a.oldest_s);

const numOpen = (entry) =>
  entry.told.states.reduce((sum, one) => sum + (one.machine === "GENERATION" ? one.count : 0), 0);

const QUEUED = ["ENCODING DEFERRED", "ENCODING LOADING", "ENCODING QUEUED", "ENCODING PREPARED",
  "REQUEST ARRIVED", "REQUEST WAITING", "REQUEST WAITING_FOR_EMBEDDINGS", "REQUEST WAITING_MID_PROMPT",
  "REQUEST PREEMPTED", "REQUEST WAITING_FOR_REMOTE_KV"];
const AT_WORK = ["ENCODING ENCODING", "REQUEST RUNNING", "REQUEST DECODING"];

/** How many images and requests are in these states at an instance. */
const numIn = (entry, name, states) => entry.told.states.reduce((sum, one) =>
  sum + (states.includes(`${one.machine} ${one.state}`) ? one.instances[name] || 0 : 0), 0);

const LATENCIES = ["time_to_first_token", "time_per_output_token"];
const QUANTILES = [0.5, 0.99];

/** The buckets of these histograms so far: how many values are at most so much, over instances. */
function bucketsOf(text) {
  const found = Object.fromEntries(LATENCIES.map((name) => [name, new Map()]));
  const lines = new RegExp(`^epd_(${LATENCIES.join("|")})_seconds_bucket.*le="(.*?)".* (.*)$`, "gm");
  for (const [, name, bound, count] of text.matchAll(lines)) {
    const most_s = bound === "+Inf" ? Infinity : +bound;
    found[name].set(most_s, (found[name].get(most_s) || 0) + +count);
  }
  return found;
}

/** Of the values since `before`, none if there were none; within a bucket they count as spread evenly. */
function quantilesSince(now, before) {
  const counts = [...now].map(([most_s, count]) => [most_s, count - (before.get(most_s) || 0)])
    .sort((a, b) => a[0] - b[0]);
  const all = counts.at(-1)?.[1];
  if (!(all > 0)) return [];
  return QUANTILES.map((share) => {
    const wanted = share * all;
    const at = counts.findIndex(([, count]) => count >= wanted);
    const [from_s, below] = at ? counts[at - 1] : [0, 0];
    const [to_s, count] = counts[at];
    return to_s === Infinity ? from_s : from_s + ((to_s - from_s) * (wanted - below)) / (count - below || 1);
  });
}

const perSecond = (flow) => `${digits(flow)}/s`;
const latency = (name) => (entry) => entry.latency[name] || [];
/** What is drawn over time: its name, its values in an entry, and one of them in words. */
const SERIES = [
  ["open requests", (entry) => [numOpen(entry)], String],
  ["finished", (entry) => [into(entry.flows, "GENERATION", "FINISHED")], perSecond],
  ["failed", (entry) => [into(entry.flows, "GENERATION", "FAILED")], perSecond],
  ["images encoded", (entry) => [entry.flows.get(edgeKey("ENCODING", "ENCODING", "RESIDENT")) || 0], perSecond],
  ["transfers", (entry) => [into(entry.flows, "INCOMING", "DELIVERED")], perSecond],
  ["TTFT p50 p99", latency("time_to_first_token"), age],
  ["TPOT p50 p99", latency("time_per_output_token"), age],
];

/** A place is what is looked into, beside the drawing of `machine`: open requests, an `instance`, a
 *  `state` (of an instance, or of all), or a `key`. */
function queryOf({ machine, state, key }) {
  const asked = key ? { key, limit: 200 } : { machine: state ? machine : "GENERATION", limit: MAX_OLDEST };
  return "?" + new URLSearchParams(state && !key ? { ...asked, state } : asked);
}

function machinesAt(entry, { machine, state, key, instance }) {
  if (key) return entry.told.machines.filter((one) => `${one.key}/`.startsWith(`${key}/`));
  return entry.told.machines.filter(state
    ? (one) => one.machine === machine && one.state === state && (!instance || one.instance === instance)
    : (one) => one.machine === "GENERATION" && !one.is_over);
}

/** Why nothing more is known of a process. */
function troubleOf(one, now_ms) {
  if (one.reason) return `${one.state}, last heard ${age(one.silent_s)} ago: ${one.reason}`;
  if (one.is_silent) return `no answer, ${one.state}`;
  return one.seen_ms ? `gone for ${age((now_ms - one.seen_ms) / 1000)}` : "";
}

const unheard = (one) => `hears nothing of ${one.silent_peers.join(", ")}`;

const loadOf = (one) =>
  Object.entries(one.load_s).map(([stage, load_s]) => `${stage} ${age(load_s)}`).join(", ");

/** Processes of this answer, and those of earlier ones that are in it no more. */
function processesAt(ring, entry) {
  const present = new Map(entry.told.processes.map((one) => [one.instance, { ...one }]));
  for (const earlier of ring) {
    if (earlier.at_ms >= entry.at_ms) break;
    for (const one of earlier.told.processes)
      if (!present.has(one.instance) || present.get(one.instance).seen_ms)
        present.set(one.instance, { ...one, seen_ms: earlier.at_ms });
  }
  for (const one of present.values()) {
    one.is_silent = entry.told.no_answer.includes(one.instance);
    if (one.is_silent) delete one.seen_ms;
    one.trouble = troubleOf(one, entry.at_ms);
    one.takes_work = !one.trouble && !["JOINING", "SUSPECT", "DRAINING"].includes(one.state);
    const is_odd = one.trouble || one.state === "SUSPECT" || one.silent_peers.length;
    one.is_red = one.state !== "LEFT" && Boolean(is_odd);
  }
  return [...present.values()].sort((a, b) => byName(a.instance, b.instance));
}

/** A machine's life as spans of states, in seconds of the gateway's time. */
function spansOf(one) {
  const lines = one.story.filter((line) => line.source !== line.target);
  return lines.map((line, at) => ({
    state: line.target,
    from_s: line.at_s,
    to_s: at + 1 < lines.length ? lines[at + 1].at_s : line.at_s + (one.is_over ? 0 : one.age_s),
  }));
}

/** The lines of all stories by time, each with its machine. */
const merged = (machines) =>
  machines.flatMap((one) => one.story.map((line) => ({ one, line })))
    .sort((a, b) => a.line.at_s - b.line.at_s);

// --- in words -------------------------------------------------------------------------------------

const digits = (value) => value.toFixed(value < 10 ? 1 : 0);

function age(seconds) {
  if (seconds < 1) return `${digits(seconds * 1000)} ms`;
  for (const [unit, size] of [["s", 1], ["m", 60]])
    if (seconds < 120 * size) return `${digits(seconds / size)} ${unit}`;
  return `${digits(seconds / 3600)} h`;
}

/** Until a clock ends the first of them; or how many it should have ended. */
const left = (one) =>
  one.late ? `, ${one.late} late` : one.left_s == null ? "" : `, ${age(one.left_s)} left`;

function amount(count, unit) {
  if (unit !== "bytes") return String(count);
  for (const [name, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (count >= size) return `${(count / size).toFixed(1)} ${name}`;
  return `${count} B`;
}

