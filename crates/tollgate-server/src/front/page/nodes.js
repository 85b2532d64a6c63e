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
