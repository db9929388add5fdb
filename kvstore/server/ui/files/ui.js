"use strict";
// Updates the verdict and the numbers, and draws the charts with uPlot. Without JavaScript the page is complete and shows
// the state when it was loaded; the captions of the charts have their figures.
(() => {
  const place = (name) => document.getElementById(name);
  const say = (element, text) => { if (element && element.textContent !== text) element.textContent = text; };

  // ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────
  const source = new EventSource("/ui/live");
  source.addEventListener("live", (event) => {
    const now = JSON.parse(event.data);
    const health = place("health");
    say(health, now.verdict);  // only if it differs, because screen readers announce changes
    health.className = "health " + now.grade;
    for (const [name, text] of Object.entries(now.numbers)) say(place("live-" + name), text);
    for (const cell of document.querySelectorAll("[data-live]")) say(cell, now.cells[cell.dataset.live] ?? cell.textContent);
    say(place("link"), now.changed === document.body.dataset.shape ? "live" : "live; reload to see the changes below");
  });
  source.addEventListener("error", () => say(place("link"), source.readyState === EventSource.CLOSED
    ? "this node sends no updates, for example because too many pages are open; reload to try again"
    : "this node does not respond; retrying"));

  // ── folded parts ──────────────────────────────────────────────────────────────────────────────────────────────────
  // A phone shows the verdict, the findings, the nodes and the load; it unfolds the rest, and the part that a link names.
  const phone = matchMedia("(max-width:40rem)"), folds = [...document.querySelectorAll("details")];
  const fold = () => folds.forEach((each) => { each.open = !phone.matches; });
  fold();
  phone.addEventListener("change", fold);
  // Browsers unfold the part around what a link names, but not a part that is named itself.
  const named = folds.find((each) => each.id && "#" + each.id === location.hash);
  if (named) { named.open = true; named.scrollIntoView(); }

  // ── charts ───────────────────────────────────────────────────────────────────────────────────────────────────────
  const REFRESH_MS = 15000, HEIGHT = 190, AXIS = 66;
  const scaled = (value, units, step) => {
    let at = 0;
    while (Math.abs(value) >= step && at < units.length - 1) { value /= step; at += 1; }
    return { value, unit: units[at] };
  };
  const digits = (value) => String(Number(value.toPrecision(3)));
  const rough = (value) => String(value >= 100 ? Math.round(value) : Number(value.toPrecision(2)));
  const number = (value) => { const found = scaled(value, ["", "k", "M", "G"], 1000); return digits(found.value) + found.unit; };
  const bytes = (value) => {  const found = scaled(value, ["B", "KiB", "MiB", "GiB", "TiB"], 1024); return digits(found.value) + " " + found.unit; };
  const time = (value) => value === 0 ? "0" : value >= 1 ? rough(value) + " s" : value >= 0.001 ? rough(value * 1e3) + " ms" : rough(value * 1e6) + " µs";
  const WORDS = {
    "per second": (value) => number(value) + "/s",
    "bytes per second": (value) => bytes(value) + "/s",
    "time": time,
    "count": number,
    "share": (value) => digits(value * 100) + "%",
  };
  // Bytes and percents have round steps of their own.
  const STEPS = {
    "bytes per second": Array.from({ length: 45 }, (_, power) => 2 ** power),
    "time": [1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60],
    "share": [0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1],
    "count": [1, 2, 5, ...Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((each) => each * 10 ** (power + 1))).flat()],
  };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const figures = [...document.querySelectorAll(".chart")];
  let drawn = [];

  const newest = (plot) => { if (plot.data[0].length) plot.setLegend({ idx: plot.data[0].length - 1 }, false); };
  const dataOf = (chart, found) => {
    const names = chart.dataset.series.split("|").map((each) => each.split("=")[0]);
    return [found.times, ...names.map((name) => found.series[name])];
  };
  // The width of an axis in CSS pixels: its longest label, with uPlot's ticks (10) and gap (5). A font differs by browser.
  const widthOf = (plot, labels) => {
    if (!labels) return AXIS;
    plot.ctx.font = plot.axes[1].font[0];
    return Math.max(AXIS, 15 + Math.ceil(Math.max(...labels.map((each) => plot.ctx.measureText(each).width)) / devicePixelRatio));
  };
  const optionsOf = (chart, found) => {
    const words = WORDS[chart.dataset.unit], isRate = chart.dataset.unit.endsWith("per second");
    const labels = chart.dataset.series.split("|").map((each) => each.split("=")[1]);
    const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 } };
    return {
      width: chart.clientWidth || 300,
      height: HEIGHT,
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1e3), "Etc/UTC"),
      scales: {
        x: { min: found.from, max: found.to, range: () => [chart.found.from, chart.found.to] },
        y: { range: (plot, low, high) => chart.dataset.unit === "share" ? [0, 1] : [0, high > 0 ? high * 1.1 : 1] },
      },
      axes: [
        { ...axis, space: 60, values: [[3600, "{HH}:{mm}", null, null, null, null, null, null, 1], [1, "{HH}:{mm}", null, null, null, null, null, null, 1]] },
        { ...axis, size: widthOf, space: 32, incrs: STEPS[chart.dataset.unit], values: (plot, ticks) => ticks.map(words) },
      ],
      series: [
        { label: "time", value: (plot, at) => at == null ? "–" : new Date(at * 1e3).toISOString().slice(11, 19) },
        ...labels.map((label, index) => ({
          label,
          stroke: colour("n" + index),
          width: 2,
          points: { size: 4 },
          value: (plot, value) => value == null ? "–" : words(isRate ? Math.round(value * 10) / 10 : value),
        })),
      ],
      cursor: { y: false, sync: { key: "charts" }, drag: { x: false, y: false } },
      legend: { live: true },
      // Away from the cursor the legend shows the newest values.
      hooks: { setCursor: [(plot) => { if (plot.cursor.idx == null) newest(plot); }], ready: [newest], setData: [newest] },
    };
  };
  // A chart can be read by keys: left and right move the cursor, and the legend shows the values there.
  const readByKeys = (chart, plot) => {
    chart.tabIndex = 0;
    chart.onkeydown = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const last = plot.data[0].length - 1, at = plot.cursor.idx ?? last;
      const next = Math.min(last, Math.max(0, at + step));
      if (last >= 0) plot.setCursor({ left: plot.valToPos(plot.data[0][next], "x"), top: 0 });
    };
  };
  const draw = (found) => {
    if (drawn.length === 0) {
      drawn = figures.map((chart) => {
        chart.found = found;
        chart.previousElementSibling.querySelector("span").hidden = true;  // the legend has the figures now
        const plot = new uPlot(optionsOf(chart, found), dataOf(chart, found), chart);
        readByKeys(chart, plot);
        return plot;
      });
      return;
    }
    drawn.forEach((plot, index) => {
      figures[index].found = found;
      plot.setData(dataOf(figures[index], found));
    });
  };
  const redraw = () => {
    const found = figures[0]?.found;
    drawn.forEach((plot) => plot.destroy());
    drawn = [];
    if (found) draw(found);
  };
  const refresh = async () => {
    try {
      const answer = await fetch("/ui/series?period=" + document.querySelector(".charts").dataset.period);
      if (answer.ok) draw(await answer.json());
    } catch (error) {
      // the line at the top says that the node does not respond
    }
  };
  if (figures.length) {
    refresh();
    setInterval(() => { if (!document.hidden) refresh(); }, REFRESH_MS);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    let width = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  }
})();
