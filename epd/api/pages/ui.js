// The loop around the parts: ask, keep, look back, go into a place and out again.

const kept = JSON.parse(document.getElementById("kept").textContent); // null, or what a file holds
const root = document.getElementById("page");
const app = {
  ring: [], look: null, place: { machine: "GENERATION" }, from: "",
  is_paused: false, needs_key: false, trouble: "",
  seeks: "", // what gets the focus when it is shown
};
let serial = 0; // of the newest question
let metrics = { at_ms: 0, buckets: null, latency: {} }; // what /metrics counted, and since before
const METRICS_MS = 5000;

function show() {
  render(html`<${Page} />`, root);
  const found = app.seeks && document.querySelector(app.seeks);
  if (!found) return;
  found.focus();
  app.seeks = "";
}

const shown = () => app.look || app.ring.at(-1);

function keep(fresh) {
  app.ring.push(entryOf(fresh, app.ring.at(-1)));
  if (app.ring.length > RING) app.ring.shift();
}

/** Latencies of the requests since the look before: they change slowly, and are asked for seldom. */
async function latencies() {
  if (Date.now() - metrics.at_ms < METRICS_MS) return metrics.latency;
  const before = metrics.buckets;
  metrics.at_ms = Date.now();
  metrics.buckets = bucketsOf(await (await fetch("metrics", { signal: AbortSignal.timeout(5 * POLL_MS) })).text());
  metrics.latency = {};
  for (const name of before ? LATENCIES : [])
    metrics.latency[name] = quantilesSince(metrics.buckets[name], before[name]);
  return metrics.latency;
}

async function ask() {
  const query = queryOf(app.place);
  const mine = ++serial;
  const key = sessionStorage.getItem("epd-key");
  try {
    const answer = await fetch(`state${query}`, {
      headers: key ? { Authorization: `Bearer ${key}` } : {},
      signal: AbortSignal.timeout(5 * POLL_MS),
    });
    const told = await answer.json();
    const latency = answer.ok ? await latencies() : {};
    await new Promise(requestAnimationFrame); // to read an answer and to show it are two frames' work
    if (mine !== serial) return; // another place is looked into by now
    app.needs_key = answer.status === 401;
    app.trouble = answer.ok ? "" : told.error.message;
    if (answer.ok) keep({ told, query, at_ms: Date.now(), latency });
  } catch (error) {
    if (mine === serial) app.trouble = `the gateway does not answer (${error.message})`;
  }
  show();
}

/** Nobody looks at a hidden page: it asks nothing. */
async function poll() {
  const begun_ms = performance.now();
  if (!app.is_paused && !app.needs_key && !document.hidden) await ask();
  setTimeout(poll, Math.max(0, POLL_MS - (performance.now() - begun_ms)));
}

/** `from`: what gets the focus on the way back, if it is not what stands for the place. */
function go({ machine, state, key, instance }, from = "") {
  app.place = { machine, state, key, instance };
  app.from = from;
  app.seeks = state || key || instance ? "#inspected" : "";
  arrive();
}

/** The focus goes where it was before this place was looked into, when that is shown again. */
function back() {
  const { machine, state, key, instance } = app.place;
  app.place = key ? { machine, state, instance } : { machine, instance: state && instance };
  app.seeks = app.from || (key ? `[data-key="${CSS.escape(key)}"]`
    : state ? `[data-state="${machine} ${state}"], [data-name=${state}]` : `[data-process="${CSS.escape(instance)}"]`);
  app.from = "";
  arrive();
}

/** Also a page that pauses asks once for what is looked into. */
function arrive() {
  show();
  if (!kept) ask();
}

addEventListener("keydown", (event) => {
  const { state, key, instance } = app.place;
  if (event.key === "Escape" && (state || key || instance)) back();
});

function enterKey(event) {
  event.preventDefault();
  sessionStorage.setItem("epd-key", event.target.elements.key.value);
  app.needs_key = false;
  ask();
}

function Key() {
  return html`<form class="bar" onSubmit=${enterKey}><label for="key">API key</label>
    <input id="key" name="key" type="password" autocomplete="off" required />
    <button>look</button> <span class="trouble" role="alert">${app.trouble}</span></form>`;
}

function Controls({ entry }) {
  const at = app.look ? Math.max(0, app.ring.indexOf(app.look)) : app.ring.length - 1;
  const ago = age((app.ring.at(-1).at_ms - entry.at_ms) / 1000);
  const when = app.look ? `${ago} before` : kept ? "the end" : app.is_paused ? "paused" : "now";
  const slide = (event) => {
    const value = +event.target.value;
    app.look = value < app.ring.length - 1 ? app.ring[value] : null;
    show();
  };
  const pause = () => { app.is_paused = !app.is_paused; show(); };
  return html`<div class="bar">
    ${!kept && html`<button aria-pressed=${String(app.is_paused)} onClick=${pause}>pause</button>`}
    <label>look back <input type="range" min="0" max=${app.ring.length - 1} value=${at}
      aria-valuetext=${when} onInput=${slide} /></label> <output>${when}</output>
  </div>`;
}

function Page() {
  if (app.needs_key) return html`<header><h1>epd</h1></header><${Key} />`;
  const entry = shown();
  if (!entry) return html`<p class=${app.trouble ? "trouble" : "soft"}>${app.trouble || "asking…"}</p>`;
  const { ring, place } = app;
  const processes = processesAt(ring, entry);
  const instances = processes.filter((one) => one.instance !== "gateway");
  const about = { ring, entry, processes, instances, place, go, back, is_kept: Boolean(kept), is_last: !app.look };
  const expected = instances.filter((one) => one.state !== "LEFT");
  const num_there = expected.filter((one) => one.takes_work).length;
  return html`
    <header><h1>${entry.told.model || "epd"}</h1>
      <span class="soft">${kept ? kept.title : `epd ${entry.told.version}, up ${age(entry.told.uptime_s)}`}</span>
      <b class=${num_there < expected.length ? "trouble" : ""}>${num_there} of ${expected.length} instances</b>
      <button class="link" data-process="gateway" onClick=${() => go({ machine: place.machine, instance: "gateway" })}>gateway</button>
      <${Controls} entry=${entry} /></header>
    ${app.trouble && html`<p class="trouble" role="alert">${app.trouble}</p>`}
    <${Cluster} ...${about} />
    <${Trouble} ...${about} />
    <main class="split">
      <${Inspector} ...${about} />
      <section aria-labelledby="machines">
        <${OverTime} ...${about} />
        <h2 id="machines">Machines</h2>
        <${Machines} ...${about} />
        <${Diagram} ...${about} />
        <${Unmoved} entry=${entry} machine=${place.machine} />
      </section>
    </main>`;
}

if (kept) {
  kept.answers.forEach(keep);
  show();
} else poll();
