// Draws what the launcher sends once a second (server-sent events). The page only reads: it has no way to act on the job.
"use strict";

const byId = (id) => document.getElementById(id);
const MAX_POINTS = 900; // of the charts; the launcher keeps as many
const MAX_EVENTS = 200;
const STATES = ["running", "waiting", "stalled", "lost", "ended", "starting"]; // each with its colour

let now = null; // the newest snapshot
let chosen = null; // a rank, or null for all
let operations = {}; // of all ranks, or of the chosen one
let points = []; // [unix s, median step s, longest step s, share in communication]
let sorted = { by: "rank", up: true };
let charts = [];

function put(element, text, full) {
  if (element.textContent !== text) element.textContent = text;
  if (full !== undefined && element.title !== full) element.title = full;
}

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// As many children as items, each updated where it stands: focus and scroll positions survive.
function match(parent, items, create, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  items.forEach((item, index) => {
    if (!parent.children[index]) parent.append(create(item, index));
    update(parent.children[index], item, index);
  });
}

// --- ranks

// Others wait for it: it holds them up now, or has for a good part of the last seconds.
function isLate(one) { return one.is_culprit || one.late_share > 0 || Boolean(one.why); }

function reason(one) {
  if (one.is_culprit) return one.note;
  if (one.why) return `late: ${one.why}: ${one.advice}`;
  return `late: the others waited for it in ${format.share(one.late_share)} of the last seconds (horoclonerun --why measures why)`;
}

function describe(one) {
  const parts = [`rank ${one.rank} on ${one.host}`, one.state];
  if (one.note && !one.is_culprit) parts.push(one.note); // else the reason
  if (isLate(one)) parts.push(reason(one));
  if (one.operation) parts.push(`last operation ${one.operation}`);
  return parts.join(", ");
}

function drawRanks() {
  match(byId("grid"), now.ranks, (one) => {
    const button = make("button", { type: "button" }, make("span"), make("small"));
    button.addEventListener("click", () => choose(Number(button.dataset.rank)));
    return button;
  }, (button, one) => {
    button.dataset.rank = one.rank;
    button.dataset.state = one.state;
    put(button.firstChild, String(one.rank));
    button.classList.toggle("late", isLate(one));
    put(button.lastChild, one.is_culprit ? "holds up" : !isLate(one) ? one.state
      : one.late_share ? `late ${format.share(one.late_share)}` : "late");
    button.setAttribute("aria-pressed", String(chosen === one.rank));
    const words = describe(one);
    if (button.title !== words) { button.title = words; button.setAttribute("aria-label", words); }
  });
  const counts = {};
  for (const one of now.ranks) counts[one.state] = (counts[one.state] || 0) + 1;
  put(byId("legend"), STATES.filter((state) => counts[state])
    .map((state) => `${counts[state]} ${state}`).join(", "));
  match(byId("reasons"), now.ranks.filter((one) => isLate(one) || one.state === "lost"), () => make("li"),
    (item, one) => put(item, `rank ${one.rank} ${isLate(one) ? reason(one) : `is lost: ${one.note}`}`));
}

function choose(rank) {
  chosen = chosen === rank ? null : rank;
  for (const element of document.querySelectorAll(".whose")) put(element, chosen === null ? "all ranks" : `rank ${chosen}`);
  draw();
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chosen !== null) choose(chosen);
  const at = document.activeElement;
  if (!at || at.parentElement !== byId("grid")) return;
  const next = { ArrowRight: at.nextElementSibling, ArrowLeft: at.previousElementSibling,
    Home: at.parentElement.firstElementChild, End: at.parentElement.lastElementChild }[event.key];
  if (next) { next.focus(); event.preventDefault(); }
});

const COLUMNS = [
  ["rank", "Rank", (one) => String(one.rank), true],
  ["host", "Host", (one) => one.host],
  ["pid", "PID", (one) => one.pid ? String(one.pid) : "-", true],
  ["state", "State", (one) => one.note ? `${one.state}: ${one.note}` : one.state],
  ["step", "Step", (one) => format.count(one.step), true],
  ["steps_per_s", "Steps/s", (one) => format.rate(one.steps_per_s), true],
  ["step_s", "Step time", (one) => format.seconds(one.step_s), true],
  ["communication", "In comm.", (one) => format.share(one.communication), true],
  ["overlap", "Overlap", (one) => format.share(one.overlap), true],
  ["bytes_per_s", "Bytes/s", (one) => format.bytes(one.bytes_per_s), true],
  ["bytes", "Bytes", (one) => format.bytes(one.bytes), true],
  ["late_s", "Waited for", (one) => one.late_s ? format.seconds(one.late_s) : "-", true],
  ["operation", "Last operation", (one) => one.operation || "-"],
];

function drawTable() {
  const head = byId("table").tHead.rows[0];
  match(head, COLUMNS, (column) => {
    const button = make("button", { type: "button", textContent: column[1] });
    button.addEventListener("click", () => {
      sorted = { by: column[0], up: sorted.by === column[0] ? !sorted.up : column[0] === "rank" || !column[3] };
      drawTable();
    });
    return make("th", { scope: "col", className: column[3] ? "number" : "" }, button);
  }, (cell, column) => {
    cell.setAttribute("aria-sort", sorted.by !== column[0] ? "none" : sorted.up ? "ascending" : "descending");
  });
  const value = (one) => one[sorted.by] ?? -Infinity;
  const rows = [...now.ranks].sort((a, b) => ((value(a) > value(b)) - (value(a) < value(b))) * (sorted.up ? 1 : -1) || a.rank - b.rank);
  match(byId("table").tBodies[0], rows, () => make("tr"), (row, one) => {
    row.dataset.rank = one.rank;
    row.dataset.state = one.state;
    match(row, COLUMNS, (column) => make("td", { className: column[3] ? "number" : column[0] === "state" ? "state" : "" }),
      (cell, column) => put(cell, column[2](one), one[column[0]] == null ? "" : String(one[column[0]])));
  });
}

// --- operations

function drawOperations() {
  const names = Object.keys(operations).sort((a, b) => operations[b].bytes - operations[a].bytes);
  const most = Math.max(1, ...names.map((name) => operations[name].bytes));
  match(byId("operations").tBodies[0], names, () => make("tr"), (row, name) => {
    const one = operations[name];
    row.dataset.operation = name;
    row.style.setProperty("--part", `${100 * one.bytes / most}%`);
    const cells = [[name], [format.count(one.count), one.count], [format.bytes(one.bytes), one.bytes],
      [format.seconds(one.count ? one.queued_s / one.count : null), one.queued_s],
      [format.seconds(one.count ? one.running_s / one.count : null), one.running_s]];
    match(row, cells, (cell, index) => make("td", { className: index ? "number" : "" }),
      (cell, [text, full]) => put(cell, text, full === undefined ? "" : String(full)));
  });
  const which = byId("which"), before = which.value;
  match(which, names, () => make("option"), (option, name) => { option.value = name; put(option, name); });
  if (names.includes(before)) which.value = before;
  drawHistogram();
}

function drawHistogram() {
  const one = operations[byId("which").value];
  const buckets = one ? one.histogram : []; // [upper bound in s or null, count], from the first that is not empty to the last
  const bound = (upper) => upper === null ? "longer" : `to ${format.seconds(upper)}`;
  const most = Math.max(1, ...buckets.map((bucket) => bucket[1]));
  const cells = buckets.flatMap(([upper, count]) => [
    ["span", "number", bound(upper)], ["i", "", "", `${100 * count / most}%`], ["span", "number", format.count(count)]]);
  const histogram = byId("histogram");
  match(histogram, cells, ([tag]) => make(tag), (element, [, name, text, width]) => {
    element.className = name;
    put(element, text);
    if (width) element.style.width = width;
  });
  histogram.setAttribute("aria-label", buckets.length
    ? buckets.map(([upper, count]) => `${count} ${bound(upper)}`).join(", ") : "nothing measured yet");
}

async function drawChosen() {
  if (chosen === null) { operations = now.operations; drawOperations(); return; }
  const asked = chosen;
  try {
    const answer = await fetch(`ranks/${asked}`);
    if (answer.ok && asked === chosen) { operations = (await answer.json()).operations; drawOperations(); }
  } catch { /* the launcher is gone: the stream says so */ }
}

// --- charts

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function chart(id, series, text) {
  const place = byId(id);
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
  const plot = new uPlot({
    width: place.clientWidth, height: 190, cursor: { drag: { x: false, y: false } },
    scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [{ ...axis, values: (_, ticks) => ticks.map(format.clock), space: 90 }, { ...axis, size: 64, values: (_, ticks) => ticks.map((value) => text(value)) }],
    series: [{ value: (_, at) => at == null ? "" : format.clock(at) }, ...series.map(([label, stroke]) => ({
      label, stroke: colour(stroke), width: 2, spanGaps: true, value: (_, value) => text(value) }))],
  }, points.length ? transposed(series.map((one) => one[2])) : [[], ...series.map(() => [])], place);
  return { plot, place, columns: series.map((one) => one[2]), labels: series.map((one) => one[0]), text };
}

function transposed(columns) { return [0, ...columns].map((column) => points.map((point) => point[column])); }

function makeCharts() {
  for (const one of charts) one.plot.destroy();
  charts = [
    chart("chart-step", [["median rank", "--first", 1], ["slowest rank", "--second", 2]], format.seconds),
    chart("chart-communication", [["mean of the ranks", "--first", 3]], format.share),
  ];
}

function drawCharts() {
  for (const one of charts) {
    one.plot.setData(transposed(one.columns));
    const last = points[points.length - 1] || [];
    one.place.setAttribute("aria-label", one.labels.map((label, index) => `${label}: ${one.text(last[one.columns[index]])}`).join(", "));
  }
}

new ResizeObserver(() => { for (const one of charts) one.plot.setSize({ width: one.place.clientWidth, height: 190 }); })
  .observe(document.querySelector("main"));

// --- the whole

function draw() {
  if (!now) return;
  const job = now.job, alive = now.ranks.filter((one) => !["lost", "ended"].includes(one.state)).length;
  put(byId("job"), `job ${job.id}`);
  document.title = `${job.ended ? "ended" : `${alive} of ${now.ranks.length} ranks`} - horoclone ${job.id}`;
  put(byId("sum-ranks"), `${alive} of ${now.ranks.length}`);
  put(byId("sum-step"), format.count(now.sum.step), String(now.sum.step));
  put(byId("sum-step-time"), format.seconds(now.sum.step_s), String(now.sum.step_s));
  put(byId("sum-communication"), format.share(now.sum.communication), String(now.sum.communication));
  put(byId("sum-throughput"), now.sum.bytes_per_s == null ? "-" : `${format.bytes(now.sum.bytes_per_s)}/s`, String(now.sum.bytes_per_s));
  put(byId("sum-slowest"), now.sum.slowest == null ? "-" : `rank ${now.sum.slowest}`, now.sum.slowest == null ? "" : `${now.sum.late_s} s`);
  drawRanks();
  drawTable();
  drawCharts();
  drawChosen();
}

function addEvents(events) {
  const list = byId("events");
  for (const one of events) {
    const at = make("time", { textContent: format.clock(one.time), dateTime: new Date(one.time * 1000).toISOString() });
    list.prepend(make("li", {}, at, one.text));
  }
  while (list.children.length > MAX_EVENTS) list.lastElementChild.remove();
}

function say(state, text) {
  byId("connection").dataset.state = state;
  put(byId("connection"), text);
}

function take(message) {
  now = message;
  if (message.point) { points.push(message.point); points.splice(0, Math.max(0, points.length - MAX_POINTS)); }
  addEvents(message.events);
  const ended = message.job.ended;
  if (ended) say(ended.exit_code ? "failed" : "ended", `the job has ended: ${ended.text}`);
  else say("live", `live, ${format.seconds(message.time - message.job.started)} since its start`);
  draw();
  return ended;
}

function listen() {
  const stream = new EventSource("events");
  stream.addEventListener("hello", (event) => {
    const message = JSON.parse(event.data);
    points = message.history;
    byId("events").replaceChildren();
    if (take(message)) stream.close();
  });
  stream.addEventListener("tick", (event) => { if (take(JSON.parse(event.data))) stream.close(); });
  stream.onerror = () => { if (!(now && now.job.ended)) say("lost", "the launcher does not answer; what is shown is old"); };
}

// --- theme

const THEMES = { system: "as the system", light: "light", dark: "dark" };

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  put(byId("theme"), `Theme: ${THEMES[theme]}`);
  byId("theme").setAttribute("aria-label", `Theme: ${THEMES[theme]}`);
  byId("theme").dataset.theme = theme;
  if (charts.length) { makeCharts(); drawCharts(); }
}

byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(byId("theme").dataset.theme) + 1) % names.length];
  try { localStorage.setItem("horoclone-theme", next); } catch { /* a browser without storage forgets it */ }
  setTheme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(byId("theme").dataset.theme));
byId("which").addEventListener("change", drawHistogram);

let remembered = null;
try { remembered = localStorage.getItem("horoclone-theme"); } catch { /* as above */ }
setTheme(remembered in THEMES ? remembered : "system");
makeCharts();
listen();
