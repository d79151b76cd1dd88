// A machine's own drawing, and over it what is known now: the drawing itself is never touched.

const FLOWS_WIDTH = 74; // of the column to the right of the rails

const drawings = new Map();
for (const svg of document.querySelectorAll("#drawings > svg")) {
  const { width, height } = svg.viewBox.baseVal;
  const box = `0 0 ${width + FLOWS_WIDTH} ${height}`;
  svg.setAttribute("viewBox", box);
  svg.setAttribute("width", width + FLOWS_WIDTH);
  svg.setAttribute("aria-hidden", "true");
  const colour = (node) => node.getAttribute("class").match(/c\d+/)[0];
  const states = [...svg.querySelectorAll("[data-state]")].map((node) => ({
    name: node.dataset.state,
    colour: colour(node),
    box: Object.fromEntries(["x", "y", "width", "height"].map((n) => [n, +node.getAttribute(n)])),
  }));
  const edges = [...svg.querySelectorAll("[data-source]")].map((node) => ({
    source: node.dataset.source,
    target: node.dataset.target,
    colour: colour(node),
    points: node.getAttribute("points"),
    y: +node.getAttribute("points").split(/[ ,]/)[1],
  }));
  drawings.set(svg.dataset.machine, { svg: svg.outerHTML, box, width, states, edges });
}
document.getElementById("drawings").remove();

const colourOf = (machine, state) =>
  drawings.get(machine)?.states.find((one) => one.name === state)?.colour || "soft";

const pressed = (act) => (event) => {
  if (event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  act();
};

function Lit({ state, known, chosen, open }) {
  const { x, y, width, height } = state.box;
  const words = known ? `${known.count}, oldest ${age(known.oldest_s)}${left(known)}` : "none";
  const look = ["state", state.colour, known && "lit", known?.late && "late", chosen && "chosen"];
  return html`<g class=${look.filter(Boolean).join(" ")} role="button" tabindex="0" data-name=${state.name}
      aria-label=${`${state.name}: ${words}`} aria-pressed=${String(chosen)}
      onClick=${open} onKeyDown=${pressed(open)}>
    <rect x=${x} y=${y} width=${width} height=${height} rx="6" />
    ${known && html`
      <text class="count" x=${x + width - 9} y=${y + 22}>${known.count}
        <tspan class="age">${" " + age(known.oldest_s)}</tspan></text>`}
  </g>`;
}

function Diagram({ entry, place, go }) {
  const drawn = drawings.get(place.machine);
  const known = new Map(
    entry.told.states.filter((one) => one.machine === place.machine).map((one) => [one.state, one]));
  const flows = drawn.edges
    .map((edge) => ({ ...edge, flow: entry.flows.get(edgeKey(place.machine, edge.source, edge.target)) }))
    .filter((edge) => edge.flow);
  return html`<div class="diagram" key=${place.machine}><div>
    <div class="drawn" dangerouslySetInnerHTML=${{ __html: drawn.svg }}></div>
    <svg class="known" viewBox=${drawn.box} role="group" aria-label=${`states of ${place.machine}`}>
      ${flows.map((edge) => html`<g key=${edge.source + edge.target} class=${edge.colour}>
        <polyline points=${edge.points} stroke-width=${3 + Math.min(4, Math.log10(1 + edge.flow) * 2)} />
        <text class="flow" x=${drawn.width - 2} y=${edge.y + 4}>${digits(edge.flow)}/s</text></g>`)}
      ${drawn.states.map((state) => html`<${Lit} key=${state.name} state=${state}
        known=${known.get(state.name)} chosen=${place.state === state.name}
        open=${() => go({ machine: place.machine, state: state.name })} />`)}
    </svg>
  </div></div>`;
}
