// The page of a run. The server sends the whole state once and merge patches afterwards; all text is set as text.
"use strict";
const RETRY = 2000, SILENT = 40000, SAY = 10000, AGAIN = 10000, DRAW = 2000, EVENTS = 200, LABELS = 24;
const PARTS = ["compute", "update", "communicate", "load", "wait"], WHOM = 6;  // columns of a bin, from 1 on
const DOING = ["computing", "updating", "communicating", "loading data", "waiting"];
const SIGNS = {died: "✕", joined: "▲", left: "▼", succeeded: "⇄", "went back to a checkpoint": "↶"};
let state = {}, last = null, name = "", token = "";

const $ = id => document.getElementById(id);
const known = value => value !== null && value !== undefined;
const whole = value => known(value) ? Math.round(value).toLocaleString("en") : "";
const short = value => known(value) ? value.toLocaleString("en", {maximumSignificantDigits: 3}) : "";
const percent = value => known(value) ? `${(100 * value).toFixed(1)} %` : "";
const bytes = value => {
  if (!known(value)) return "";
  const power = Math.max(0, Math.min(4, Math.floor(Math.log10(Math.max(value, 1)) / 3)));
  return `${short(value / 1000 ** power)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
};
const clock = value => {
  if (value < 60) return `${short(value)} s`;
  const two = number => String(Math.floor(number) % 60).padStart(2, "0"), minutes = Math.floor(value / 60);
  return minutes < 60 ? `${minutes}:${two(value)}` : `${Math.floor(minutes / 60)}:${two(minutes)}:${two(value)}`;
};
const make = (tag, words = {}, ...inside) => {
  const made = Object.assign(document.createElement(tag), words);
  made.append(...inside);
  return made;
};
const write = (element, text) => { if (element.textContent !== text) element.textContent = text; };
const label = (element, text) => element.setAttribute("aria-label", text);
const entries = object => Object.entries(object || {});
const sorted = object => entries(object).map(([key, value]) => [Number(key), value]).sort((a, b) => a[0] - b[0]);
const values = object => sorted(object).map(one => one[1]);

// state

const merged = (target, patch) => {  // RFC 7386
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const to = target && typeof target === "object" && !Array.isArray(target) ? target : Object.create(null);
  for (const [key, value] of Object.entries(patch)) if (value === null) delete to[key]; else to[key] = merged(to[key], value);
  return to;
};
let due = false;
const take = (id, kind, part) => {
  name = id;
  if (kind === "press") token = part; else state = merged(kind === "whole" ? null : state, part);
  if (!due) requestAnimationFrame(() => { due = false; show(); });
  due = true;
};

// connection

const tell = (text, lost = false) => { write($("link"), text); $("link").className = lost ? "lost" : ""; };
const lose = () => tell("The page's server does not answer; trying again", true);
const tellEnd = run => tell([run.outcome, run.reason].filter(Boolean).join(": ") || "ended");
const end = () => {
  const run = state.run || {};
  tellEnd(run); last = state;
  $("replay").hidden = !run.seconds;
  $("at").max = $("at").value = run.seconds || 0;
  setTimeout(goOn, AGAIN);
};
// a job that is resumed goes on in the same folder
const goOn = async () => {
  try {
    const parts = document.hidden ? [] : await (await fetch(`state?after=${name}`)).json();
    if (parts.some(part => part[2].run?.running)) {
      play(false); $("replay").hidden = true; wanted = last = null; name = "";
      return listen();
    }
    if (parts.length) name = parts.at(-1)[0];
    setTimeout(goOn, AGAIN);
  } catch { /* its server has ended, too */ }
};
let hush = null;
const listen = () => {
  if (hush) hush();
  const source = new EventSource(`events?after=${name}`);
  let fails = 0, came = false, timer = 0;
  const close = hush = () => { source.close(); clearTimeout(timer); };
  const giveUp = () => { close(); hush = null; lose(); poll(came); };
  const hear = event => {
    fails = 0; came = true; tell("live");
    clearTimeout(timer); timer = setTimeout(giveUp, SILENT);
    if (event.data) take(event.lastEventId, event.type, JSON.parse(event.data));
  };
  for (const kind of ["whole", "patch", "press", "alive"]) source.addEventListener(kind, hear);
  source.addEventListener("end", () => { close(); end(); });
  source.onerror = () => { lose(); if (source.readyState === EventSource.CLOSED || ++fails > 1) giveUp(); };
  timer = setTimeout(giveUp, SILENT);
};
// a browser allows six connections to a host: a page that nobody sees leaves its own to others
document.onvisibilitychange = () => { if (hush && !last) document.hidden ? hush() : listen(); };
// a server that is back is listened to again; where streams do not pass, it is asked again and again
const poll = async streams => {
  try {
    const answer = await fetch(`state?after=${name}`, {signal: AbortSignal.timeout(SILENT)});
    if (answer.status === 403) return tell("The token is no longer valid: open the new address of this page", true);
    if (!answer.ok) throw new Error(answer.status);
    for (const part of await answer.json()) take(...part);
    if (state.run?.running === false) return end();
    if (streams) return listen();
    tell("live, by asking every 2 s");
  } catch { lose(); }
  setTimeout(poll, RETRY, streams);
};
const press = async (button, role) => {
  try {
    const answer = await fetch(`press/${button}/${encodeURIComponent(role)}`, {method: "POST", headers: {"X-Press": token}});
    if (!answer.ok) return tell(await answer.text(), true);
    const got = await answer.json();
    token = got.press;
    tell(got.told);
  } catch { lose(); }
};
$("stop").onclick = () => { if (confirm("Stop the job? It keeps a checkpoint.")) press("stop", "job"); };

// replay

let wanted = null, fetching = false, playing = 0;
const replay = async () => {
  wanted = Number($("at").value);
  write($("moment"), clock(wanted));
  if (fetching) return;
  fetching = true;
  for (let now; (now = wanted) !== null;) {
    wanted = null;
    try {
      const then = now < last.run.seconds ? await (await fetch(`state/${now.toFixed(3)}`)).json() : last;
      if (!last) break;
      state = then; tellEnd(last.run);
    } catch { tell("The run cannot be read at this moment", true); }
    show();
  }
  fetching = false;
};
const play = on => {
  clearInterval(playing);
  let before = performance.now();
  const step = () => {
    const now = performance.now();
    $("at").value = Number($("at").value) + (now - before) / 1000 * Number($("speed").value);
    before = now;
    replay();
    if (Number($("at").value) >= Number($("at").max)) play(false);
  };
  playing = on ? setInterval(step, 250) : 0;
  write($("play"), on ? "Pause" : "Play");
};
$("at").oninput = replay;
$("play").onclick = () => {
  if (!playing && Number($("at").value) >= Number($("at").max)) $("at").value = 0;
  play(!playing);
};

// what is shown

let spoke = -SAY, eventsShown = "";
const show = () => {
  const run = state.run || {}, numbers = state.numbers || {}, sentence = state.sentence || "";
  write($("title"), run.title || "distbelief");
  write($("folder"), run.folder + (run.simulated ? ", simulated" : ""));
  document.title = `${sentence} · ${run.title}`;
  write($("sentence"), sentence);
  if (performance.now() >= spoke + SAY) { spoke = performance.now(); write($("said"), sentence); }
  $("diagnosis").replaceChildren(...entries(state.diagnosis).map(([rule, [evidence, remedy]]) => make("li", {},
    make("b", {}, `${rule}: `), make("small", {}, evidence), remedy ? "; try " : "", make("code", {}, remedy))));
  const figures = [["epoch", numbers.epochs ? `${whole(numbers.epoch)} of ${whole(numbers.epochs)}` : ""],
    ["samples", whole(numbers.samples)], ["samples/s", whole(numbers.rate)], ["test accuracy", percent(numbers.accuracy)],
    ["test loss", short(numbers.test_loss)], ["training loss", short(numbers.train_loss)],
    ["staleness", short(numbers.staleness)], ["sent", bytes(numbers.sent)], ["received", bytes(numbers.received)],
    ["shared memory", bytes(numbers.shared_memory)], ["time", known(run.seconds) ? clock(run.at ?? run.seconds) : ""]];
  $("numbers").replaceChildren(...figures.filter(one => one[1]).map(([term, text]) =>
    make("div", {}, make("dt", {}, term), make("dd", {}, text))));
  $("stop").hidden = !token || !run.running;
  showMembers(run);
  rows("shards", entries(state.shards), ["", "", "last"], (one, [version, pushes, reason]) => {
    write(version, whole(one.version)); write(pushes, short(one.pushes)); write(reason, one.waits_for || "");
  });
  showStaleness();
  const events = sorted(state.events).slice(-EVENTS).reverse(), key = `${events.length} ${events[0]?.[0]}`;
  if (key !== eventsShown) $("events").replaceChildren(...events.map(([, [seconds, text, command]]) => make("li", {},
    make("span", {className: "dim"}, `${clock(seconds)} `), text, " ", make("code", {}, command || ""))));
  eventsShown = key;
  if (window.Plotly) drawCharts(); else requestAnimationFrame(loadCharts);
};
// rows stay where they are, and so does the focus on a button in one
const rows = (table, items, kinds, fill, made = () => {}) => {
  const before = new Map([...$(table).rows].map(row => [row.dataset.name, row])), place = key => key.startsWith("replica") ? 0 : 1;
  items.sort(([a], [b]) => place(a) - place(b) || a.localeCompare(b, "en", {numeric: true}));
  const now = items.map(([key]) => {
    if (before.has(key)) return before.get(key);
    const row = make("tr", {}, make("th", {scope: "row"}, key), ...kinds.map(kind => make("td", {className: kind})));
    row.dataset.name = key; made(row, key);
    return row;
  });
  if (now.some((row, at) => row !== $(table).rows[at]) || now.length < before.size) $(table).replaceChildren(...now);
  now.forEach((row, at) => fill(items[at][1], [...row.cells].slice(1), items[at][0]));
};
const showMembers = run => {
  const bands = state.bands || {}, until = run.at ?? run.seconds ?? 0;
  const since = Math.min(until, ...Object.values(bands).flatMap(band => Object.keys(band).map(Number)));
  write($("span"), `the last ${clock(until - since)}`);
  const members = entries(state.members).filter(([key]) => !key.startsWith("shard"));
  const fill = (one, [doing, rate, stale, share, heard, band], key) => {
    write(doing, one.gone ? "gone" : one.waits_for ? "waits" : one.state || "");
    doing.title = one.gone || (one.waits_for ? `waits ${one.waits_for} ${known(one.waited) ? `for ${one.waited} s` : ""}` : "");
    write(rate, short(one.rate)); write(stale, short(one.staleness)); write(share, percent(one.participation));
    write(heard, known(one.heard) ? `${short(one.heard)} s` : "");
    if (bands[key]) drawBand(band, key, sorted(bands[key]), since, until);
    for (const button of doing.parentElement.querySelectorAll("button")) button.hidden = !token || !run.running;
  };
  rows("members", members, ["state", "", "more", "", "more", "band"], fill, (row, key) => {
    if (key.startsWith("replica")) row.firstChild.append(" ",
      make("button", {onclick: () => press("kill", key), ariaLabel: `Kill ${key}`}, "Kill"));
  });
};
const drawBand = (cell, key, bins, since, until) => {
  if (!cell.firstChild) cell.append(make("canvas", {role: "img"}));
  const canvas = cell.firstChild, ratio = devicePixelRatio || 1, wide = canvas.clientWidth, high = canvas.clientHeight;
  canvas.width = wide * ratio; canvas.height = high * ratio;
  const pen = canvas.getContext("2d"), place = seconds => (seconds - since) / (until - since || 1) * wide;
  const sums = PARTS.map(() => 0), reasons = {};
  pen.scale(ratio, ratio);
  for (const [start, bin] of bins) {
    let floor = high;
    PARTS.forEach((part, at) => {
      const tall = bin[at + 1] / 100 * high;
      pen.fillStyle = colour(part);
      pen.fillRect(place(start), floor -= tall, place(start + bin[0]) - place(start) + .5, tall);
      sums[at] += bin[at + 1] * bin[0];
    });
    if (bin[WHOM]) reasons[bin[WHOM]] = (reasons[bin[WHOM]] || 0) + bin[WHOM - 1] * bin[0];
  }
  const marks = values(state.marks).filter(mark => mark[1] === key && mark[0] >= since);
  Object.assign(pen, {fillStyle: colour("ink"), font: "bold 12px system-ui", textAlign: "center"});
  for (const [seconds, , kind] of marks) {
    pen.fillRect(place(seconds) - .5, 0, 1, high);
    pen.fillText(SIGNS[kind] || "•", Math.max(6, Math.min(wide - 6, place(seconds))), 12);
  }
  const total = sums.reduce((a, b) => a + b, 0), most = entries(reasons).sort((a, b) => b[1] - a[1])[0];
  const words = DOING.map((doing, at) => sums[at] ? `${doing} ${percent(sums[at] / total)}` : "").filter(Boolean).join(", ");
  const text = [words + (most ? `, mostly for ${most[0]}` : ""), ...marks.map(mark => `${mark[2]} at ${clock(mark[0])}`)];
  label(canvas, `${key}: ${canvas.title = text.filter(Boolean).join("; ")}`);
};
const showStaleness = () => {
  const range = value => value < 32 ? value : `${value} to ${value + 2 ** (27 - Math.clz32(value)) - 1}`;  // a class has five binary digits
  const bars = sorted(state.staleness), most = Math.max(1, ...bars.map(bar => bar[1]));
  $("staleness").replaceChildren(...bars.slice(0, 60).map(([value, count]) => {
    const bar = make("i");
    bar.style.height = `${80 * count / most}%`;
    return make("div", {title: `${whole(count)} pushes of staleness ${range(value)}`}, bar, bars.length > LABELS ? "" : String(value));
  }));
  label($("staleness"), bars.map(([value, count]) => `${whole(count)} of staleness ${range(value)}`).join(", ") || "no pushes");
};

// charts, loaded after the rest is painted

let colours = {}, over = "seconds", drawn = 0, waiting = 0;
const colour = part => colours[part] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${part}`).trim();
const loadCharts = () => {
  if (!$("plotly")) document.head.append(make("script", {id: "plotly", src: "plotly/plotly.min.js", onload: () => drawCharts()}));
};
const drawCharts = () => {
  clearTimeout(waiting);
  if (drawn && performance.now() < drawn + DRAW) { waiting = setTimeout(drawCharts, DRAW); return; }
  drawn = performance.now();
  const numbers = state.numbers || {}, target = state.target || {}, tests = values(state.measures), bins = sorted(state.series);
  if (state.run?.running) bins.pop();  // it is not over
  let sum = 0;
  const at = bins.map(([start, bin]) => { sum += bin[1]; return over === "seconds" ? start + bin[0] : sum; });
  const column = number => bins.map(([, bin]) => bin[number]), speed = number => bins.map(([, bin]) => bin[number] / bin[0]);
  const tested = tests.map(test => test[over === "seconds" ? 0 : 1]);
  const line = (title, x, y, shade, more = {}) =>
    ({name: title, x, y, mode: "lines", line: {color: colour(shade), width: 1.7}, hoverinfo: "x+y+name", ...more});
  const edge = {line: {width: 0}, showlegend: false, hoverinfo: "skip", yaxis: "y2"};
  const goal = ([y, yref]) => ({type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, yref,
    line: {dash: "dash", width: 1, color: colour("dim")}});
  plot("learning", [line("least", at, column(2), "communicate", edge),
    line("most", at, column(4), "communicate", {...edge, fill: "tonexty", fillcolor: `${colour("communicate")}33`}),
    line("training loss", at, column(3), "communicate", {yaxis: "y2"}),
    line("test loss", tested, tests.map(test => test[3]), "load", {yaxis: "y2", line: {color: colour("load"), dash: "dot"}}),
    line("test accuracy", tested, tests.map(test => test[2]), "compute", {mode: "lines+markers", marker: {size: 5}})],
    {shapes: [[target.accuracy, "y"], [target.loss, "y2"]].filter(one => one[0]).map(goal), yaxis: {tickformat: ".0%"},
      yaxis2: {overlaying: "y", side: "right", showgrid: false, rangemode: "tozero", tickformat: ".2~f"}},
    `test accuracy ${percent(numbers.accuracy) || "unknown"}, training loss ${short(numbers.train_loss) || "unknown"}`);
  // marks of roles without a band, such as a shard whose standby has succeeded it
  const marks = values(state.marks).filter(mark => !state.bands?.[mark[1]] && mark[2] !== "joined");
  const told = marks.map(([seconds, role, kind]) => `${role} ${kind} at ${clock(seconds)}`.trim());
  const annotations = over === "seconds" ? marks.map(([x, , kind], n) =>
    ({x, y: 1, yref: "paper", text: SIGNS[kind] || "•", hovertext: told[n], showarrow: false})) : [];
  plot("rate", [line("samples a second", at, speed(1), "compute")], {showlegend: false, annotations},
    [`${whole(numbers.rate)} samples a second`, ...told].join("; "));
  plot("bytes", ["sent", "received", "shared memory"].map((way, n) => line(way, at, speed(5 + n), ["compute", "communicate", "load"][n])),
    {yaxis: {tickformat: "~s"}},
    `${bytes(numbers.sent)} sent, ${bytes(numbers.received)} received, ${bytes(numbers.shared_memory)} in shared memory`);
};
const plot = (id, data, more, text) => {
  const axis = {gridcolor: colour("grid"), zerolinecolor: colour("line"), automargin: true};
  Plotly.react(id, data, {margin: {l: 46, r: 46, t: 24, b: 26}, font: {color: colour("ink"), size: 11}, uirevision: over,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", legend: {orientation: "h", y: 1, yanchor: "bottom"}, ...more,
    xaxis: {...axis, ticksuffix: over === "seconds" ? " s" : ""}, yaxis: {...axis, rangemode: "tozero", ...more.yaxis},
    ...(more.yaxis2 ? {yaxis2: {...axis, ...more.yaxis2}} : {})}, {responsive: true, displayModeBar: false});
  label($(id), text);
};
$("axis").onclick = () => {
  over = over === "seconds" ? "samples" : "seconds";
  $("axis").setAttribute("aria-pressed", over === "samples");
  drawn = 0; drawCharts();
};
matchMedia("(prefers-color-scheme:dark)").addEventListener("change", () => { colours = {}; drawn = 0; show(); });
addEventListener("resize", show);
history.replaceState(null, "", location.pathname);  // the cookie has the token now
$("legend").append(...PARTS.map((part, at) => make("span", {}, make("i", {style: `background:var(--${part})`}), DOING[at])),
  ...entries(SIGNS).slice(0, 4).map(([kind, sign]) => make("span", {}, `${sign} ${kind}`)));
listen();
