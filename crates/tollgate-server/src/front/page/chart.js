// Charts: bars that stand on each other, lines, the limit, and bands for what was wrong. Values are read by pointer, touch and arrow keys,
// and stand in a table besides.
//
// y begins at 0 and has few round ticks. Labels of bands are in a lane above the data, never over it.

import { h } from "./nodes.js";
import { clock, rate } from "./words.js";

const RIGHT = 6;
const BOTTOM = 18;

const isHatched = (kind) => kind === "hs" || kind === "hd";
const paint = (kind, attributes) => h(isHatched(kind) ? "rect" : `rect.${kind}`, { ...attributes, fill: isHatched(kind) ? `url(#${kind})` : null });

/** What a legend shows of a series: `f1`, `f2`, `fd`, `hs`, `hd`, `w` for a band, `i` for a mark, or `line.l2.dashed`. */
export function swatch(kind) {
  const drawn = kind.startsWith("line") ? h(`path.${kind}`, { d: "M0 5.5H11" })
    : kind === "i" ? h("path.mark", { d: "M5.5 0V11", "stroke-width": 2 })
      : kind === "w" ? h("rect.fw", { width: 11, height: 11, opacity: 0.35 })
        : paint(kind, { width: 11, height: 11 });
  return h("svg.swatch", { viewBox: "0 0 11 11", "aria-hidden": "true" }, drawn);
}

export const legend = (items) => h("ul.legend", items.map(([kind, words]) => h("li", swatch(kind), words)));

/** A bar of parts of one: `[[kind, share], …]`, with words behind it. */
export function meter(parts, words, label, className = "meter") {
  const bar = h("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": label });
  let x = 0;
  for (const [kind, share] of parts) {
    const width = Math.max(0, Math.min(100 - x, share * 100));
    if (width > 0) bar.append(paint(kind, { x, y: 0, width, height: 8 }));
    x += width;
  }
  return h(`div.${className}`, bar, words !== null && h("span.v", words));
}

/** A step between ticks that is round, and with which so many are enough. */
function niceStep(value, ticks) {
  const raw = Math.max(value, 1e-9) / ticks;
  const size = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map((step) => step * size).find((step) => step * ticks >= value * (1 - 1e-9)) ?? size * 10;
}

/**
 * A chart in `host`. What it shows is given to `update`: `label`, `t0` and `step` in seconds, `series` of `{ name, kind, values, isLine }` (a value of null is not known),
 * and perhaps `height`, `y` (how values are written), `unit`, `limit` `{ value, label }`, `events` `{ kind, from, to, label, long }` (of kind `w`, `i`, or `n` for what is not known), `now`, `mark`.
 */
export function chart(host) {
  host.className = "plot";
  host.tabIndex = 0;
  host.setAttribute("role", "group");
  host.setAttribute("aria-roledescription", "chart");
  const live = h("p.unseen", { "aria-live": "polite" });
  const tip = h("div.tip", { hidden: true });
  let shown = null;
  let at = null;
  let width = 0;
  let cross = null;
  let left = 42;
  const count = () => shown.series[0].values.length;
  const x = (index) => left + (index / count()) * (width - left - RIGHT);

  function draw() {
    width = host.clientWidth;
    if (!shown || width < 90) return;
    const { height = 180, y = rate, series, t0, step, events = [], limit = null } = shown;
    const top = events.length || shown.hasLane ? 18 : 8;
    const plotHeight = height - top - BOTTOM;
    const bars = series.filter(({ isLine }) => !isLine);
    let most = limit ? limit.value * 1.04 : 0;
    for (let index = 0; index < count(); index += 1) {
      most = Math.max(most, bars.reduce((sum, { values }) => sum + (values[index] ?? 0), 0));
      for (const { isLine, values } of series) if (isLine) most = Math.max(most, values[index] ?? 0);
    }
    const tick = niceStep(Math.max(most, shown.least ?? 1), shown.ticks ?? 3);
    const ceiling = Math.max(tick, Math.ceil(most / tick - 1e-9) * tick);
    left = shown.gutter ?? 42;
    const plotWidth = width - left - RIGHT;
    const yOf = (value) => top + plotHeight - (value / ceiling) * plotHeight;
    const xOf = (time) => Math.max(left, Math.min(width - RIGHT, left + ((time - t0) / (step * count())) * plotWidth));
    const drawn = h("svg", { width, height, "aria-hidden": "true" });
    for (let value = 0; value <= ceiling * (1 + 1e-9); value += tick) {
      const line = Math.round(yOf(value)) + 0.5;
      drawn.append(h(value ? "path.grid" : "path.base", { d: `M${left} ${line}H${width - RIGHT}` }),
        h("text", { x: left - 6, y: line + 4, "text-anchor": "end" }, y(value)));
    }
    drawEvents(drawn, events.filter(({ from, to }) => (to ?? from) > t0 && from < t0 + step * count()), { top, plotHeight, xOf });
    drawBars(drawn, bars, plotWidth, yOf);
    for (const { isLine, values, kind } of series) {
      if (!isLine) continue;
      let pen = "M";
      const path = values.map((value, index) => {
        if (value === null) { pen = "M"; return ""; }
        const piece = `${pen}${(x(index) + plotWidth / count() / 2).toFixed(1)} ${yOf(value).toFixed(1)}`;
        pen = "L";
        return piece;
      });
      drawn.append(h(`path.${kind}`, { d: path.join("") }));
    }
    if (limit) {
      const line = Math.round(yOf(limit.value)) + 0.5;
      drawn.append(h("path.cap", { d: `M${left} ${line}H${width - RIGHT}` }),
        h("text.k", { x: width - RIGHT, y: line - 4, "text-anchor": "end" }, limit.label));
    }
    drawTimes(drawn, { height, top, plotHeight, plotWidth, xOf });
    if (shown.mark) {
      drawn.append(h("circle.f2", { cx: xOf(shown.mark.at), cy: yOf(0), r: 4 }),
        h("text.k", { x: Math.min(xOf(shown.mark.at) + 36, width), y: yOf(0) - 20, "text-anchor": "end" }, shown.mark.label));
    }
    cross = h("rect.cross", { display: "none", y: top, width: Math.max(2, plotWidth / count()), height: plotHeight });
    drawn.append(cross);
    host.replaceChildren(drawn, tip, live);
    if (at !== null) show(Math.min(at, count() - 1), false);
  }

  function drawEvents(drawn, events, { top, plotHeight, xOf }) {
    let room = width - RIGHT + 6;
    for (const { kind, from, to, label } of events.sort((one, other) => other.from - one.from)) {
      const [start, end] = [xOf(from), to ? xOf(to) : xOf(from)];
      const words = label.length * 5.9;
      const last = Math.min(start + words, room - 6);
      if (to) {
        const none = kind === "n" ? ".n" : "";
        drawn.append(h(`rect.band${none}`, { x: start, y: top, width: Math.max(3, end - start), height: plotHeight }),
          h(`path.band-edge${none}`, { d: `M${start} ${top + 0.5}H${Math.max(start + 3, end)}` }));
      } else {
        drawn.append(h("path.mark", { d: `M${Math.round(start) + 0.5} ${top - 3}V${top + plotHeight}` }));
      }
      if (last - words < left - 20) continue; // no room is left for its words; the readout has them
      room = last - words - 4;
      drawn.append(h(`text.${kind}`, { x: last - words, y: top - 6 }, label));
    }
  }

  function drawBars(drawn, bars, plotWidth, yOf) {
    const bar = plotWidth / count();
    const gap = bar > 4 ? 1 : 0;
    for (let index = 0; index < count(); index += 1) {
      let below = 0;
      for (const { values, kind } of bars) {
        const value = values[index];
        if (!value) continue;
        const [low, high] = [yOf(below), yOf(below + value)];
        below += value;
        drawn.append(paint(kind, { x: (x(index) + gap / 2).toFixed(1), y: high.toFixed(1), width: (bar - gap).toFixed(1), height: Math.max(0.75, low - high).toFixed(1) }));
      }
    }
  }

  function drawTimes(drawn, { height, top, plotHeight, plotWidth, xOf }) {
    const { t0, step, now } = shown;
    const total = step * count();
    const every = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800]
      .find((size) => total / size <= plotWidth / 62) ?? total;
    const offset = new Date(t0 * 1000).getTimezoneOffset() * 60;
    for (let time = Math.ceil((t0 + 1 - offset) / every) * every + offset; time < t0 + total; time += every) {
      const place = xOf(time);
      const isNearNow = now && Math.abs(place - xOf(now)) < 34;
      if (place <= left + 14 || place >= width - RIGHT - (now ? 16 : every < 60 ? 52 : 40) || isNearNow) continue;
      drawn.append(h("path.base", { d: `M${place} ${top + plotHeight}v4` }),
        h("text", { x: place, y: height - 3, "text-anchor": "middle" }, clock(time, every < 60)));
    }
    if (!now) drawn.append(h("text", { x: width - RIGHT, y: height - 3, "text-anchor": "end" }, "now"));
    else drawn.append(h("path.now", { d: `M${xOf(now)} ${top}V${top + plotHeight}` }), h("text.k", { x: xOf(now), y: height - 3, "text-anchor": "middle" }, "now"));
  }

  function show(index, speaks) {
    at = index;
    tip.hidden = index === null;
    cross?.setAttribute("display", index === null ? "none" : "inline");
    if (index === null || !cross) return;
    cross.setAttribute("x", x(index));
    const { t0, step, series, y = rate, unit = "", events = [] } = shown;
    const from = t0 + index * step;
    const rows = series.filter(({ values }) => values[index] !== null && values[index] !== undefined).toReversed();
    const met = events.filter((one) => (one.to ? one.from < from + step && one.to > from : one.from >= from && one.from < from + step));
    const when = step < 60 ? `${clock(from, true)}, ${Math.round(step * 10) / 10} s` : `${clock(from)} to ${clock(from + step)}`;
    tip.replaceChildren(h("p", when),
      h("dl", rows.map(({ kind, name, values }) => [h("dt", swatch(kind)), h("dt", name), h("dd", h("b", y(values[index])), unit)])),
      ...met.map(({ kind, long, label }) => h(kind === "w" ? "p.warn" : "p.info", long ?? label)));
    const isRight = x(index) > width / 2;
    tip.style.left = isRight ? "auto" : `${x(index) + width / count() + 8}px`;
    tip.style.right = isRight ? `${width - x(index) + 8}px` : "auto";
    if (speaks) live.textContent = `${when}: ${rows.map(({ name, values }) => `${y(values[index])}${unit} ${name}`).join(", ")}${met.map(({ long, label }) => `. ${long ?? label}`).join("")}`;
  }

  const picked = (event) => {
    const box = host.getBoundingClientRect();
    return Math.max(0, Math.min(count() - 1, Math.floor(((event.clientX - box.left - left) / (width - left - RIGHT)) * count())));
  };
  host.addEventListener("pointermove", (event) => shown && show(picked(event), false));
  host.addEventListener("pointerdown", (event) => shown && show(picked(event), false));
  host.addEventListener("pointerleave", () => show(null));
  host.addEventListener("blur", () => show(null));
  host.addEventListener("keydown", (event) => {
    if (!shown) return;
    if (event.key === "Escape") show(null);
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -count(), End: count() }[event.key];
    if (!step) return;
    event.preventDefault();
    show(Math.max(0, Math.min(count() - 1, (at ?? (step > 0 ? -1 : count())) + step)), true);
  });
  new ResizeObserver(() => { if (host.clientWidth !== width) draw(); }).observe(host);

  return {
    update(options) {
      shown = options;
      host.setAttribute("aria-label", `${options.label}. Arrow keys read the values.`);
      draw();
    },
  };
}

/** The numbers of a chart as a table, for `details`; filled when it is opened. */
export function numbers(details, getOptions) {
  const body = h("tbody");
  const head = h("tr");
  const region = h("div.scroll", { tabindex: 0, role: "region", "aria-label": "The numbers" }, h("table.table", h("thead", head), body));
  details.replaceChildren(h("summary", "The numbers"), region);
  const show = () => {
    const options = getOptions();
    if (!details.open || !options) return;
    const { series, t0, step, y = rate } = options;
    head.replaceChildren(h("th", { scope: "col" }, "from"), ...series.map(({ name }) => h("th.num", { scope: "col" }, name)));
    body.replaceChildren(...series[0].values.map((_, index) => h("tr", h("td", clock(t0 + index * step, step < 60)),
      series.map(({ values }) => h("td.num", values[index] === null ? "–" : y(values[index]))))).reverse());
  };
  details.addEventListener("toggle", show);
}
