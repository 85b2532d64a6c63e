// What is known of limits: their seconds, minutes and quarters of an hour, as rates for the range that is shown.

const SECONDS = 300;
const KINDS = ["allowed", "denied", "would_deny", "fell_back"];
const AVERAGED = 5; // seconds, so that rates do not flicker

/** How many bars a range has, how many seconds each, and how it is called. */
export const RANGES = {
  "5m": { count: 60, step: 5, name: "5 min", words: "last 5 min" },
  "1h": { count: 60, step: 60, name: "1 h", words: "last hour", field: "minutes" },
  "24h": { count: 96, step: 900, name: "24 h", words: "last 24 h", field: "quarters" },
};

const series = new Map(); // by name: { last, allowed, denied, would_deny, fell_back }
const longer = new Map(); // by name: { at, minutes, quarters }

/** Adds the seconds of a snapshot to those that are known. False if some are missing between them. */
export function remember(snapshot) {
  let isWhole = true;
  const names = new Set();
  for (const { limit, seconds, minutes, quarters } of snapshot.limits) {
    names.add(limit);
    if (minutes) longer.set(limit, { at: snapshot.second, minutes, quarters });
    const last = snapshot.second - 1;
    const count = seconds.allowed.length;
    const known = series.get(limit);
    if (count >= SECONDS || !known) {
      const padding = new Array(SECONDS - count).fill(0);
      series.set(limit, { last, ...Object.fromEntries(KINDS.map((kind) => [kind, padding.concat(seconds[kind])])) });
      isWhole &&= count >= SECONDS;
      continue;
    }
    const passed = last - known.last;
    if (passed < 0 || passed > count) isWhole = false;
    const zeros = new Array(Math.min(Math.max(passed, 0), SECONDS)).fill(0);
    for (const kind of KINDS) {
      known[kind] = known[kind].concat(zeros).slice(-SECONDS);
      known[kind].splice(SECONDS - count, count, ...seconds[kind]);
    }
    known.last = last;
  }
  for (const known of [series, longer]) for (const name of known.keys()) if (!names.has(name)) known.delete(name);
  return isWhole;
}

const sumOf = (counts) => counts.reduce((sum, count) => sum + count, 0);

/** How many a second lately. */
export function now(name, kind) {
  return sumOf(series.get(name)[kind].slice(-AVERAGED)) / AVERAGED;
}

/**
 * The bars of a range as rates a second, oldest first: `{ t0, step, allowed, denied, would_deny, fell_back }`; and what they come to: `totals` of the
 * same kinds, of so many `seconds`. The last bar of a longer range is not full yet, so its rate is no measure of the range.
 */
export function ranged(name, range) {
  const { count, step, field } = RANGES[range];
  const known = series.get(name);
  const { at, [field]: sums } = (field && longer.get(name)) ?? { at: known.last + 1 };
  const t0 = field ? Math.floor(at / step) * step - (count - 1) * step : known.last + 1 - SECONDS;
  const age = field ? Math.max(at - t0 - (count - 1) * step, 1) : step; // of the last bar
  const counts = (kind) => Array.from({ length: count }, (_, index) => (field ? sums?.[kind][index] ?? 0 : sumOf(known[kind].slice(index * step, (index + 1) * step))));
  const bars = { t0, step, totals: {}, seconds: (count - 1) * step + age };
  for (const kind of KINDS) {
    const all = counts(kind);
    bars[kind] = all.map((one, index) => one / (index === count - 1 ? age : step));
    bars.totals[kind] = sumOf(all);
  }
  return bars;
}

/** The same of all limits together. */
export function rangedAll(names, range) {
  const all = names.map((name) => ranged(name, range));
  const { count, step } = RANGES[range];
  const sum = (kind) => Array.from({ length: count }, (_, index) => all.reduce((total, one) => total + one[kind][index], 0));
  return { t0: all[0]?.t0 ?? Date.now() / 1000 - count * step, step, ...Object.fromEntries(KINDS.map((kind) => [kind, sum(kind)])) };
}

/** Whether nothing was asked in a range. */
export const isIdle = (bars) => KINDS.every((kind) => bars[kind].every((rate) => rate === 0));
