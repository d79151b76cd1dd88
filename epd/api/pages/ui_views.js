// The parts of the page. Each is a function of what is known and of the place that is looked into.

const MAX_ROWS = 200; // of a story; a browser lays out more, but nobody reads them

function Table({ label, head, children }) {
  return html`<div class="wide"><table aria-label=${label}>
    <thead><tr>${head.map((name) => html`<th scope="col" class=${name === "last event" ? "more" : ""}>${name}</th>`)}</tr></thead>
    <tbody>${children}</tbody></table></div>`;
}

function Memory({ one }) {
  const text = `${one.kind} ${amount(one.used, one.unit)} of ${amount(one.capacity, one.unit)}`;
  const unit = one.unit === "bytes" ? "" : ` ${one.unit}`;
  return html`<span class="memory"><meter min="0" max=${one.capacity} value=${one.used} aria-label=${one.kind}></meter>
    ${text}${unit}</span>`;
}

/** A line for each of its values; gaps are where nothing is known. */
function Series({ name, index, words, ring, entry }) {
  const from_ms = ring[0].at_ms;
  const scale = 240 / Math.max(ring.at(-1).at_ms - from_ms, 1);
  const at = (one) => ((one.at_ms - from_ms) * scale).toFixed(1);
  const values = ring.map((one) => one.series[index]);
  const most = Math.max(...values.flat(), 0);
  const paths = [];
  values.forEach((ones, when) => ones.forEach((one, line) => {
    const goes_on = values[when - 1]?.length > line;
    paths[line] = `${paths[line] || ""}${goes_on ? "L" : "M"}${at(ring[when])} ${(30 - (28 * one) / (most || 1)).toFixed(1)}`;
  }));
  const text = entry.series[index].map(words).join(" ") || "-";
  return html`<figure><figcaption>${name} <b>${text}</b></figcaption>
    <svg viewBox="0 0 240 32" role="img" aria-label=${`${name}: ${text}, at most ${words(most)}`}>
      ${paths.map((path) => html`<path d=${path} />`)}
      <line x1=${at(entry)} x2=${at(entry)} y1="0" y2="32" /></svg></figure>`;
}

const OverTime = ({ ring, entry }) =>
  html`<section aria-label="over time" class="series">${SERIES.map(([name, , words], index) =>
    html`<${Series} key=${name} ...${{ name, index, words, ring, entry }} />`)}</section>`;

/** Who is lost, refused or waits, what is late, and what has failed since the page was opened. */
function Trouble({ ring, entry, instances, place, go }) {
  const late = lateStates(entry);
  const outside = entry.told.outside || [];
  const red = instances.filter((one) => one.is_red);
  const failed = (of) => into(of.counts, "GENERATION", "FAILED");
  const fresh = failed(entry) - failed(ring[0]);
  const illegal = numIllegal(entry);
  const none = !entry.note && ![...late, ...outside, ...red].length && !fresh && !illegal;
  return html`<section class="alerts" aria-label="trouble">
    ${entry.note && html`<p class="trouble" role="alert">${entry.note}</p>`}
    ${red.map((one) => html`<button key=${one.instance} class="late" onClick=${() => go({ machine: place.machine, instance: one.instance })}>
      <b>${one.instance}</b> ${one.trouble || (one.silent_peers.length ? unheard(one) : one.state)}</button>`)}
    ${late.map((one) => html`<button key=${one.machine + one.state} class="late" onClick=${() => go(one)}>
      ${one.machine} ${one.state} <b>${one.late}</b> ${age(one.oldest_s)}</button>`)}
    ${outside.map((one) => html`<p class="trouble" key=${one.epoch} data-outside=${one.instance}>
      ${one.instance} (pid ${one.pid}, ${one.endpoint}): ${one.state} ${age(one.since_s)} ago: ${one.reason}</p>`)}
    ${fresh > 0 && html`<p class="trouble">requests that failed in ${age((entry.at_ms - ring[0].at_ms) / 1000)}: ${fresh}</p>`}
    ${illegal > 0 && html`<p class="trouble">illegal events since their processes began: ${illegal}</p>`}
    ${none && html`<p class="soft">nothing is lost, refused, waiting or late</p>`}
  </section>`;
}

function Machines({ entry, place, go }) {
  return html`<nav aria-label="machines">${[...drawings.keys()].map((name) => {
    const states = entry.told.states.filter((one) => one.machine === name);
    const count = states.reduce((sum, one) => sum + one.count, 0);
    const late = states.some((one) => one.late);
    return html`<button key=${name} class=${late ? "late" : ""} aria-pressed=${String(place.machine === name)}
      onClick=${() => go({ machine: name })}>${name} <b>${count || ""}</b></button>`;
  })}</nav>`;
}

/** Events that moved nothing: the table ignores them for a reason, or they are illegal. */
function Unmoved({ entry, machine }) {
  const found = entry.told.edges.filter((one) => one.machine === machine && one.reason);
  if (!found.length) return null;
  const illegal = found.filter((one) => one.reason === "illegal");
  return html`<details><summary class=${illegal.length ? "late" : ""}>
      events that moved nothing (${illegal.length} of them illegal)</summary>
    <${Table} label="events that moved nothing" head=${["state", "event", "times", "reason"]}>
      ${found.map((one) => html`<tr class=${one.reason === "illegal" ? "late" : ""}
          key=${one.source + one.event + one.reason}>
        <td>${one.source}</td><td>${one.event}</td><td>${one.count}</td><td>${one.reason}</td></tr>`)}
    <//></details>`;
}

// --- into a state, into a machine -----------------------------------------------------------------

function Oldest({ machines, place, go }) {
  const where = place.state ? "process" : "state";
  return html`<${Table} label=${place.state ? `oldest in ${place.state}` : "open requests"} head=${["age", "left", where, "last event", "key"]}>
    ${machines.slice(0, MAX_OLDEST).map((one) => html`<tr key=${`${one.instance} ${one.key}`}
        class=${one.is_late ? "late" : ""}>
      <td>${age(one.age_s)}</td><td>${one.is_late ? "late" : one.left_s == null ? "" : age(one.left_s)}</td>
      <td>${place.state ? one.instance : one.state}</td><td class="more">${one.story.at(-1)?.event}</td>
      <td><button class="link" data-key=${one.key} onClick=${() => go({ ...place, key: one.key })}>${one.key}</button></td></tr>`)}
  <//>`;
}

/** What is known of a process, and its machines. */
function Instance({ one, entry, place, go }) {
  const name = one.instance;
  const bytes = ({ peer, transport, nbytes, per_s }) => `${peer} by ${transport} ${amount(nbytes, "bytes")}, ${rate(per_s)}`;
  const facts = {
    roles: one.roles.join(", "),
    state: one.trouble || one.state,
    load: loadOf(one),
    memory: one.memory.filter((kind) => kind.capacity).map((kind) => html`<${Memory} key=${kind.kind} one=${kind} />`),
    assigned: one.assigned,
    "in use": Object.entries(one.in_use).filter(([, count]) => count).map(([kind, count]) => `${kind} ${count}`).join(", "),
    peers: Object.entries(one.transports).map(([peer, transport]) => `${peer} by ${transport}`).join("; "),
    "slower than possible": Object.entries(one.fallbacks).map(([peer, reason]) => html`<p class="trouble">${peer} ${reason}</p>`),
    "sent to": entry.links.filter((link) => link.instance === name).map(bytes).join("; "),
    epoch: one.epoch,
    pid: one.pid,
  };
  return html`<table aria-label=${name}><tbody>${Object.entries(facts).filter(([, value]) => value && value.length !== 0)
      .map(([fact, value]) => html`<tr key=${fact}><th scope="row">${fact}</th><td>${value}</td></tr>`)}</tbody></table>
    <${Table} label=${`machines of ${name}`} head=${["machine", "state", "count"]}>
      ${entry.told.states.filter((state) => state.instances[name]).map((state) => html`<tr key=${state.machine + state.state}>
        <td>${state.machine}</td>
        <td><button class="link" data-state=${`${state.machine} ${state.state}`}
          onClick=${() => go({ machine: state.machine, state: state.state, instance: name })}>${state.state}</button></td>
        <td>${state.instances[name]}</td></tr>`)}
    <//>`;
}

/** What the key is a part of: its room, attempt, request. */
function Above({ place, go }) {
  const parts = place.key.split("/");
  return html`<p aria-label="parts of the key">${parts.map((part, at) => {
    const key = parts.slice(0, at + 1).join("/");
    return html`${at ? " / " : ""}<button key=${key} class="link" disabled=${key === place.key}
      onClick=${() => go({ ...place, key })}>${part}</button>`;
  })}</p>`;
}

function Waterfall({ machines }) {
  const rows = machines.map((one) => ({ one, spans: spansOf(one) })).filter((row) => row.spans.length)
    .sort((a, b) => a.spans[0].from_s - b.spans[0].from_s);
  const from_s = Math.min(...rows.map((row) => row.spans[0].from_s));
  const to_s = Math.max(...rows.map((row) => row.spans.at(-1).to_s));
  const scale = 1000 / Math.max(to_s - from_s, 1e-6);
  return html`<div class="waterfall" role="group" aria-label="waterfall">${rows.map(({ one, spans }) => html`
    <div key=${`${one.instance} ${one.machine} ${one.key}`}>
      <span>${one.instance} ${one.machine}</span>
      <svg viewBox="0 0 1000 14" preserveAspectRatio="none" role="img"
          aria-label=${spans.map((span) => `${span.state} ${age(span.to_s - span.from_s)}`).join(", ")}>
        ${spans.map((span) => html`<rect class=${colourOf(one.machine, span.state)} y="1" height="12"
          x=${(span.from_s - from_s) * scale} width=${Math.max(2, (span.to_s - span.from_s) * scale)}>
          <title>${span.state} ${age(span.to_s - span.from_s)}</title></rect>`)}
      </svg>
      <span>${one.state}${one.is_over ? "" : ` for ${age(one.age_s)}`}</span>
    </div>`)}<p class="soft">${age(to_s - from_s)} from left to right</p></div>`;
}

/** A column for each process: both ends of a room side by side, a request over all that serve it. */
function Sequence({ machines }) {
  const lines = merged(machines);
  const processes = [...new Set(lines.map(({ one }) => one.instance))];
  const start_s = lines[0].line.at_s;
  return html`<${Table} label="events by time" head=${["ms", ...processes]}>
    ${lines.slice(-MAX_ROWS).map(({ one, line }, at) => html`<tr key=${at}>
      <td class="number">${((line.at_s - start_s) * 1000).toFixed(1)}</td>
      ${processes.map((name) => html`<td>${name === one.instance && html`
        <small>${one.machine} ${line.event}${line.times > 1 ? ` ×${line.times}` : ""}</small>
        ${line.source !== line.target && html`<br /><b class=${colourOf(one.machine, line.target)}>${line.target}</b>`}`}</td>`)}
    </tr>`)}<//>`;
}

/** Takes the id of an answer, too, which has the request's behind a prefix. */
function Search({ place, go }) {
  const find = (event) => {
    event.preventDefault();
    const key = event.target.elements.sought.value.trim().replace(/^(chatcmpl-|cmpl-|msg_|resp_)/, "");
    if (key) go({ machine: place.machine, key }, "#sought");
  };
  return html`<form role="search" class="bar" onSubmit=${find}><label for="sought">find by id</label>
    <input id="sought" name="sought" autocomplete="off" spellcheck="false" /><button>find</button></form>`;
}

function Inspector({ entry, processes, place, go, back, is_kept, is_last }) {
  const { key, state, instance } = place;
  const one = !state && !key && processes.find((one) => one.instance === instance);
  const asked = is_kept || entry.query === queryOf(place);
  const machines = asked && !one ? machinesAt(entry, place) : [];
  const known = machines.some((one) => one.story.length);
  const title = key ? "One story" : state ? `${place.machine} ${state}` : instance || `Open requests ${numOpen(entry) || ""}`;
  const empty = one ? "" : !asked ? (is_last ? "asking…" : "These were not asked for at that time.") : is_kept ? "None is kept."
    : key ? "No process knows it." : state ? "No machine is in this state." : "There are none.";
  return html`<section id="inspector" aria-labelledby="inspected">
    <h2 id="inspected" tabindex="-1">${title}${state && !key && instance ? ` at ${instance}` : ""}
      ${(key || state || instance) && html`<button onClick=${back}>back <kbd>Esc</kbd></button>`}</h2>
    <${Search} ...${{ place, go }} />
    ${key && html`<${Above} ...${{ place, go }} />`}
    ${one && html`<${Instance} ...${{ one, entry, place, go }} />`}
    ${!one && !machines.length && html`<p class="soft">${empty}</p>`}
    ${machines.length > 0 && !key && html`<${Oldest} ...${{ machines, place, go }} />`}
    ${known && key && html`<${Waterfall} machines=${machines} /><${Sequence} machines=${machines} />`}
  </section>`;
}
