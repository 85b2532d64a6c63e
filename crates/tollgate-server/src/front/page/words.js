// How numbers, times and limits are written.

export const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const oneDigit = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const rate = (value) => (value >= 10000 ? short : value < 10 ? oneDigit : number).format(value);

/** A span of milliseconds, as people say it. */
export function span(ms) {
  if (ms < 1000) return `${Math.ceil(ms)} ms`;
  const seconds = ms / 1000;
  if (seconds < 10) return `${oneDigit.format(Math.ceil(seconds * 10) / 10)} s`;
  const whole = Math.ceil(seconds);
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => whole >= size);
  let rest = whole;
  const words = [];
  for (const [size, unit] of parts.slice(first, first + 2)) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count > 0) words.push(`${count} ${unit}`);
  }
  return words.join(" ");
}

/** A latency in nanoseconds. */
export function latency(ns) {
  const three = (value) => (value >= 100 ? number : value >= 10 ? oneDigit : new Intl.NumberFormat("en", { maximumFractionDigits: 2 })).format(value);
  if (ns < 1e3) return `${number.format(ns)} ns`;
  if (ns < 1e6) return `${three(ns / 1e3)} µs`;
  if (ns < 1e9) return `${three(ns / 1e6)} ms`;
  return `${three(ns / 1e9)} s`;
}

/** A time of day in this browser's zone. */
export const clock = (second, hasSeconds = false) => new Date(second * 1000).toLocaleTimeString([], { hour12: false, hour: "2-digit", minute: "2-digit", second: hasSeconds ? "2-digit" : undefined });

/** The same, with the day where that is another one. */
export function moment(second, hasSeconds = false) {
  const date = new Date(second * 1000);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? clock(second, hasSeconds) : `${date.toLocaleDateString([], { day: "numeric", month: "short" })} ${clock(second)}`;
}

export const plural = (count, one, many = `${one}s`) => `${number.format(count)} ${count === 1 ? one : many}`;

export const percent = (share) => (share === 0 ? "0 %" : share < 0.0005 ? "<0.1 %" : `${(share < 0.1 ? oneDigit : number).format(share * 100)} %`);

export const clockTime = (second) => new Date(second * 1000).toLocaleTimeString([], { hour12: false });

export function dateTime(second) {
  const date = new Date(second * 1000);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? clockTime(second) : date.toLocaleString([], { hour12: false, dateStyle: "medium", timeStyle: "short" });
}

const STRATEGIES = {
  token_bucket: "Token bucket",
  leaky_bucket: "Leaky bucket",
  fixed_window: "Fixed window",
  sliding_window: "Sliding window",
  sliding_window_counter: "Sliding window counter",
  concurrency: "Concurrency",
};

/** What a limit allows, and by which strategy, for a row. */
export function ruleWords(limit) {
  if (limit.ad_hoc) return "numbers come with each call";
  const strategy = STRATEGIES[limit.strategy];
  return strategy ? `${limit.rule} · ${strategy.toLowerCase()}` : limit.rule;
}

export function policyWords(limit) {
  const words = limit.ad_hoc ? ["Numbers come with each call"] : [STRATEGIES[limit.strategy] ?? "No counting", limit.rule];
  if (limit.overrides > 0) words.push(limit.overrides === 1 ? "1 override" : `${limit.overrides} overrides`);
  words.push(limit.store === "memory" ? "in memory" : `in ${limit.store}, falls back ${limit.fallback}`);
  return words.join(" · ");
}
