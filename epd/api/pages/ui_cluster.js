// The cluster as a drawing: a node for each instance below the stages that it serves, and an arrow
// to each other one that it has sent bytes to, with how many it sends a second.

const STAGES = ["encode", "prefill", "decode"];
const COLUMN = 1.6; // of one stage, with the gap to the next, in widths of a node
const LANE = 0.3; // of the gap: there an arrow is level, below its text
const NODE_REM = 18.5; // wide at most
const HEAD_PX = 28; // the name of a stage
const LINE_PX = 19; // of a node's text, and what is above and below it: as in the style
const EDGE_PX = 20;
const PORT_PX = 16; // between arrows that end at one node
const GAP_PX = 14; // between nodes

const rate = (per_s) => `${amount(Math.round(per_s), "bytes")}/s`;

/** Heights follow from what is known before anything is laid out; x is in widths of a node. */
function drawingOf(instances, links) {
  const stages = STAGES.filter((stage) => instances.some((one) => one.roles.includes(stage)));
  const pairs = new Map(); // whatever the transport
  for (const { instance, peer, per_s } of links) {
    const pair = `${instance} ${peer}`;
    pairs.set(pair, { instance, peer, per_s: per_s + (pairs.get(pair)?.per_s || 0) });
  }
  const nodes = instances.map((one) => {
    const known = one.roles.map((role) => stages.indexOf(role)).filter((column) => column >= 0);
    const at = known.length ? known : [0];
    const memory = one.trouble ? [] : one.memory.filter((kind) => kind.capacity);
    const inside = pairs.get(`${one.instance} ${one.instance}`);
    return { one, memory, inside, first: Math.min(...at), last: Math.max(...at) };
  }).sort((a, b) => a.first - b.first || a.last - b.last);
  const named = new Map(nodes.map((node) => [node.one.instance, node]));
  const arrows = [...pairs.values()]
    .map(({ instance, peer, per_s }) => ({ from: named.get(instance), to: named.get(peer), per_s }))
    .filter(({ from, to }) => from && to && from !== to);
  const floors = Array(Math.max(1, stages.length)).fill(HEAD_PX);
  for (const node of nodes) {
    node.ins = arrows.filter(({ to }) => to === node);
    const lines = node.one.trouble ? 3 : 2 + node.memory.length + Boolean(node.inside);
    node.height = Math.max(EDGE_PX + LINE_PX * lines, PORT_PX * (node.ins.length + 1));
    node.y = Math.max(...floors.slice(node.first, node.last + 1));
    floors.fill(node.y + node.height + GAP_PX, node.first, node.last + 1);
  }
  const height = Math.max(...floors);
  if (nodes.every((node) => node.first === node.last)) // columns of their own: each in the middle
    for (const node of nodes) node.y += (height - floors[node.first]) / 2;
  for (const { ins, ...node } of nodes)
    ins.sort((a, b) => a.from.y - b.from.y).forEach((arrow, at) => {
      arrow.start_y = arrow.from.y + arrow.from.height / 2;
      arrow.y = node.y + node.height / 2 + (at - (ins.length - 1) / 2) * PORT_PX;
    });
  const right = Math.max(...nodes.map(rightOf), 1);
  const has_bow = arrows.some((arrow) => !sideOf(arrow) && rightOf(arrow.to) === right);
  return { stages, nodes, arrows, width: right + (has_bow ? 0.5 : 0), height: height - GAP_PX };
}

const rightOf = (node) => COLUMN * node.last + 1;
/** Of an arrow: to the right, to the left, or 0: to a node above or below, around right edges. */
const sideOf = ({ from, to }) => (to.first > from.last) - (to.last < from.first);

function Arrow({ arrow, percent }) {
  const { from, to, per_s, start_y, y } = arrow;
  const side = sideOf(arrow);
  const look = { class: per_s ? "busy" : "", "marker-end": "url(#tip)" };
  if (!side) return html`<svg x=${percent(rightOf(to))} overflow="visible"><path
    d=${`M0 ${start_y}C40 ${start_y} 40 ${y} 0 ${y}`} ...${look} /></svg>`;
  const [start, end] = side > 0 ? [rightOf(from), COLUMN * to.first] : [COLUMN * from.first, rightOf(to)];
  const [x1, x2, x3] = [start, end - side * LANE, end].map(percent);
  return html`<line x1=${x1} y1=${start_y} x2=${x2} y2=${y} class=${look.class} />
    <line x1=${x2} y1=${y} x2=${x3} y2=${y} ...${look} />`;
}

/** Above the end of its arrow, in front of all of them. */
function Rate({ arrow, percent }) {
  const { to, per_s, start_y, y } = arrow;
  const side = sideOf(arrow);
  const at = side > 0 ? { x: percent(COLUMN * to.first), dx: -12, y: y - 4, "text-anchor": "end" }
    : { x: percent(rightOf(to)), dx: side ? 12 : 36, y: side ? y - 4 : (start_y + y) / 2 + 4 };
  return html`<text ...${at}>${rate(per_s)}</text>`;
}

function Node({ node, entry, percent, chosen, open, sends }) {
  const { one } = node;
  const name = one.instance;
  const state = ["HEALTHY", "ALIVE"].includes(one.state) ? loadOf(one) : one.state;
  const work = `queue ${numIn(entry, name, QUEUED)}, at work ${numIn(entry, name, AT_WORK)}`;
  const told = one.trouble || (one.silent_peers.length ? unheard(one) : [state, work].filter(Boolean).join(", "));
  const box = { left: percent(COLUMN * node.first), width: percent(rightOf(node) - COLUMN * node.first),
    top: `${node.y}px`, height: `${node.height}px` };
  return html`<button class=${one.is_red ? "node late" : "node"} style=${box} data-process=${name}
      aria-pressed=${String(chosen)} title=${`${name}: ${told}`} onClick=${open}>
    <span><b>${name}</b>${one.num_ranks > 1 && ` ${one.num_ranks} processes`}</span>
    <span class=${one.trouble ? "wraps" : ""}>${told}</span>
    ${node.memory.map((kind) => html`<${Memory} key=${kind.kind} one=${kind} />`)}
    ${node.inside && html`<span>within itself ${rate(node.inside.per_s)}</span>`}
    ${sends.map(({ to, per_s }) => html`<span class="sends">→ ${to.one.instance} ${rate(per_s)}</span>`)}
  </button>`;
}

function Cluster({ instances, entry, place, go }) {
  const left = instances.filter((one) => one.state === "LEFT");
  const there = instances.filter((one) => one.state !== "LEFT");
  const { stages, nodes, arrows, width, height } = drawingOf(there, entry.links);
  const percent = (x) => `${(100 * x) / width}%`;
  const busy = arrows.filter((arrow) => arrow.per_s);
  const flows = busy.map(({ from, to, per_s }) => `${from.one.instance} to ${to.one.instance} ${rate(per_s)}`);
  return html`<section aria-label="cluster">
    <div class="cluster" style=${{ height: `${height}px`, maxWidth: `${NODE_REM * width}rem` }}>
      ${stages.map((name, at) => html`<span class="stage" key=${name} style=${{ left: percent(COLUMN * at) }}>${name}</span>`)}
      <svg role="img" aria-label=${`bytes: ${flows.join(", ") || "none"}`}>
        <marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"
          markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8Z" /></marker>
        ${arrows.map((arrow) => html`<${Arrow} ...${{ arrow, percent }} />`)}
        ${busy.map((arrow) => html`<${Rate} ...${{ arrow, percent }} />`)}
      </svg>
      ${nodes.map((node) => html`<${Node} key=${node.one.instance} ...${{ node, entry, percent }}
        sends=${busy.filter(({ from }) => from === node)} chosen=${place.instance === node.one.instance}
        open=${() => go({ machine: place.machine, instance: node.one.instance })} />`)}
    </div>
    ${left.length > 0 && html`<p class="soft">left:
      ${left.map((one) => ` ${one.instance} ${age(one.silent_s)} ago`).join(",")}</p>`}
  </section>`;
}
