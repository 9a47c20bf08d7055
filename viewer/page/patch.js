// Update elements on the page in place, so that focus, selection and scroll position are not lost.
//
// Use it only for trees of text and links, because event listeners are not replaced. Children with a `data-key` are
// matched by that key, all others by position.

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.dataset.key : undefined;
}

function patchAttributes(shown, fresh) {
  for (const { name } of [...shown.attributes]) {
    const isSetByUser = name === "open"; // the user unfolded it
    if (!isSetByUser && !fresh.hasAttribute(name)) shown.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  }
}

function patchChildren(shown, fresh) {
  const wantedKeys = new Set([...fresh.childNodes].map(keyOf));
  const shownByKey = new Map();
  for (const child of [...shown.childNodes]) {
    const key = keyOf(child);
    if (key && wantedKeys.has(key)) shownByKey.set(key, child);
    else if (key) child.remove();
  }
  let place = shown.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const key = keyOf(wanted);
    const match = key ? shownByKey.get(key) : place && !keyOf(place) ? place : null;
    if (!match) {
      shown.insertBefore(wanted, place);
    } else if (match === place) {
      place = place.nextSibling;
      patch(match, wanted);
    } else {
      shown.insertBefore(match, place);
      patch(match, wanted);
    }
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

/** Make `shown` equal to `fresh`, changing only the parts that differ. */
export function patch(shown, fresh) {
  if (shown.nodeName !== fresh.nodeName) {
    shown.replaceWith(fresh);
  } else if (shown.nodeType === Node.TEXT_NODE) {
    if (shown.data !== fresh.data) shown.data = fresh.data;
  } else {
    patchAttributes(shown, fresh);
    patchChildren(shown, fresh);
  }
}
