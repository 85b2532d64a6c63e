// One line for each thing that is wrong: what, since when, why, and a link. Amber where service is degraded, red where something was refused.

import { $, attribute, make, put } from "./nodes.js";

/** Shows a notice, or takes it away where `text` is null. */
export function notice(key, title, text, { isAmber = false, link = null } = {}) {
  const known = [...$("alerts").children].find((one) => one.dataset.key === key);
  if (text === null) {
    known?.remove();
    return;
  }
  const shown = known ?? $("alerts").appendChild(make("section", isAmber ? "alert amber" : "alert"));
  if (!known) {
    shown.dataset.key = key;
    shown.append(make("h2"), make("pre"));
    if (link) shown.append(make("a", "", link.words));
  }
  put(shown.children[0], title);
  put(shown.children[1], text);
  if (link) attribute(shown.children[2], "href", link.href);
}
