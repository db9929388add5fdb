"use strict";
// Keeps the line of health and the numbers fresh. Without it the page is whole, as it was when it was loaded.
(() => {
  const place = (name) => document.getElementById(name);
  const say = (element, text) => { if (element && element.textContent !== text) element.textContent = text; };
  const source = new EventSource("/ui/live");
  source.addEventListener("live", (event) => {
    const now = JSON.parse(event.data);
    const health = place("health");
    say(health, now.health);
    health.className = "health " + now.grade;
    for (const [name, text] of Object.entries(now.numbers)) say(place("live-" + name), text);
    for (const [id, text] of Object.entries(now.partitions)) say(document.querySelector(`[data-load="${CSS.escape(id)}"]`), text);
    say(place("link"), now.changed === document.body.dataset.shape ? "live" : "live; reload to see what has changed below");
  });
  source.addEventListener("error", () => say(place("link"), "this node does not answer; trying again"));
})();
