"use strict";
// Updates the health line and the numbers. Without JavaScript the page is complete and shows the state when it was loaded.
(() => {
  const place = (name) => document.getElementById(name);
  const say = (element, text) => { if (element && element.textContent !== text) element.textContent = text; };
  // Text between backticks is code. The element changes only if the text differs, because screen readers announce changes.
  const tell = (element, text) => {
    if (element.textContent === text.replaceAll("`", "")) return;
    const code = (piece) => { const made = document.createElement("code"); made.textContent = piece; return made; };
    const pieces = text.split("`");
    element.replaceChildren(...(pieces.length % 2 ? pieces.map((piece, place) => place % 2 ? code(piece) : piece) : [text]));
  };
  const source = new EventSource("/ui/live");
  source.addEventListener("live", (event) => {
    const now = JSON.parse(event.data);
    const health = place("health");
    tell(health, now.health);
    health.className = "health " + now.grade;
    for (const [name, text] of Object.entries(now.numbers)) say(place("live-" + name), text);
    for (const cell of document.querySelectorAll("[data-live]")) say(cell, now.cells[cell.dataset.live] ?? cell.textContent);
    say(place("link"), now.changed === document.body.dataset.shape ? "live" : "live; reload to see the changes below");
  });
  source.addEventListener("error", () => say(place("link"), "this node does not respond; retrying"));
})();
