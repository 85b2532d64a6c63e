// What is done to the document: texts, attributes and elements, and never markup.

export const $ = (id) => document.getElementById(id);

/** Sets a text only where it differs, so that a quiet page stays quiet. */
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function attribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

const DRAWN = new Set(["svg", "g", "path", "rect", "text", "circle"]);

/** An element: `tag.class.class`, then attributes, texts and other elements. What is null or false is left out. */
export function h(what, ...parts) {
  const [tag, ...classes] = what.split(".");
  const element = DRAWN.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const part of parts.flat(3)) {
    if (part === null || part === undefined || part === false) continue;
    if (part instanceof Node) element.append(part);
    else if (typeof part !== "object") element.append(String(part));
    else for (const [name, value] of Object.entries(part)) set(element, name, value);
  }
  return element;
}

function set(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
  else element.setAttribute(name, value === true ? "" : value);
}

/** Fills an element anew where what it shows has changed. */
export function fill(element, shown, build) {
  const text = JSON.stringify(shown);
  if (element.shown === text) return;
  element.shown = text;
  element.replaceChildren(...[build()].flat(3).filter((part) => part !== null && part !== false));
}

/** One child for each item, in their order: those of known items stay, so that focus and selection do. */
export function each(parent, items, keyOf, create, update) {
  parent.known ??= new Map();
  const keys = new Set(items.map(keyOf));
  for (const [key, element] of parent.known) {
    if (keys.has(key)) continue;
    element.remove();
    parent.known.delete(key);
  }
  items.forEach((item, index) => {
    const key = keyOf(item);
    let element = parent.known.get(key);
    if (!element) {
      element = create(item);
      parent.known.set(key, element);
    }
    if (parent.children[index] !== element) parent.insertBefore(element, parent.children[index] ?? null);
    update(element, item, index);
  });
}

/** The options of a select; the choice stays if it can. */
export function options(select, names) {
  if ([...select.options].map((option) => option.value).join("\n") === names.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) select.value = chosen;
}

export async function copy(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it by hand";
  }
  setTimeout(() => put(button, before), 1500);
}
