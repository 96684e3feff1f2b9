// The page of a run. The server sends the whole state once and merge patches afterwards; all text is set as text.
"use strict";
const $ = name => document.getElementById(name);
const RETRY = 2000, SILENT = 40000, SAY = 10000, DRAW = 2000, EVENTS = 200;
const WAITS = 6;  // where a bin of a band says who was waited for
const PARTS = ["compute", "update", "communicate", "load", "wait"];
const DOING = ["computing", "updating", "communicating", "loading data", "waiting"];
const SIGNS = {died: "✕", joined: "▲", left: "▼", succeeded: "⇄", "went back to a checkpoint": "↶"};
let state = {}, last = null, id = "", token = document.querySelector("meta[name=press]").content;

// text

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
  const seconds = Math.floor(value), two = number => String(number).padStart(2, "0");
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  return hours ? `${hours}:${two(minutes % 60)}:${two(seconds % 60)}` : `${minutes}:${two(seconds % 60)}`;
};
const make = (tag, words = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), words);
  made.append(...children);
  return made;
};
const write = (element, text) => { if (element.textContent !== text) element.textContent = text; };
const label = (element, text) => element.setAttribute("aria-label", text);
const entries = object => Object.entries(object || {});
const numbered = object => entries(object).map(([key, value]) => [Number(key), value]).sort((a, b) => a[0] - b[0]);

// state

const merged = (target, patch) => {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const object = target && typeof target === "object" && !Array.isArray(target);
  const to = object ? target : Object.create(null);
  for (const [name, value] of Object.entries(patch))
    if (value === null) delete to[name]; else to[name] = merged(to[name], value);
  return to;
};
let waiting = false;
const take = (patch, anew) => {
  state = merged(anew ? null : state, patch);
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; show(); });
};

// connection

const tell = (text, lost = false) => { write($("link"), text); $("link").className = lost ? "lost" : ""; };
const lost = () => tell("The page's server does not answer; trying again", true);
const over = () => {
  const run = state.run || {};
  tell([run.outcome, run.reason].filter(Boolean).join(": ") || "ended");
  last = state;
  $("replay").hidden = !run.seconds;
  $("at").max = $("at").value = run.seconds || 0;
};
const listen = () => {
  const source = new EventSource(`events?after=${id}`);
  let fails = 0, came = false, timer = 0;
  const giveUp = () => { source.close(); clearTimeout(timer); poll(came); };
  const hear = event => {
    fails = 0; came = true; id = event.lastEventId || id;
    tell("live");
    clearTimeout(timer); timer = setTimeout(giveUp, SILENT);
  };
  source.addEventListener("whole", event => { hear(event); take(JSON.parse(event.data), true); });
  source.addEventListener("patch", event => { hear(event); take(JSON.parse(event.data)); });
  source.addEventListener("alive", hear);
  source.addEventListener("end", () => { source.close(); clearTimeout(timer); over(); });
  source.onerror = () => { lost(); if (source.readyState === EventSource.CLOSED || ++fails > 1) giveUp(); };
  timer = setTimeout(giveUp, SILENT);
};
// a server that is back is listened to again; where streams do not pass, it is asked again and again
const poll = async streams => {
  try {
    const answer = await fetch(`state?after=${id}`);
    if (answer.status === 403) return tell("The token is no longer valid: open the new address of this page", true);
    if (!answer.ok) throw new Error(answer.status);
    const got = await answer.json();
    id = got.id;
    for (const one of got.whole || got.patches) take(one, Boolean(got.whole));
    if (state.run && state.run.running === false) return over();
    if (streams) return listen();
    tell("live, by asking every 2 s");
  } catch { lost(); }
  setTimeout(poll, RETRY, streams);
};

// replay

let wanted = null, fetching = false, played = 0;
const replay = async moment => {
  wanted = moment;
  write($("moment"), clock(moment));
  if (fetching) return;
  fetching = true;
  while (wanted !== null) {
    const now = wanted;
    wanted = null;
    if (now >= last.run.seconds) state = last;
    else try { state = await (await fetch(`state?at=${now}`)).json(); } catch { lost(); }
    show();
  }
  fetching = false;
};
const stopPlaying = () => { clearInterval(played); played = 0; pressed("play", "Play", false); };
const pressed = (name, text, on) => { write($(name), text); $(name).setAttribute("aria-pressed", on); };
$("at").oninput = () => replay(Number($("at").value));
$("play").onclick = () => {
  if (played) return stopPlaying();
  if (Number($("at").value) >= last.run.seconds) $("at").value = 0;
  let before = performance.now();
  played = setInterval(() => {
    const now = performance.now(), passed = (now - before) / 1000 * Number($("speed").value);
    before = now;
    $("at").value = Math.min(last.run.seconds, Number($("at").value) + passed);
    replay(Number($("at").value));
    if (Number($("at").value) >= last.run.seconds) stopPlaying();
  }, 250);
  pressed("play", "Pause", true);
};

// what is shown

let spoke = 0;
const show = () => {
  const run = state.run || {}, numbers = state.numbers || {};
  write($("title"), run.title || "distbelief");
  write($("folder"), run.folder + (run.simulated ? ", simulated" : ""));
  document.title = `${state.sentence} · ${run.title}`;
  write($("sentence"), state.sentence || "");
  if (performance.now() > spoke + SAY || !spoke) { spoke = performance.now(); write($("said"), state.sentence || ""); }
  $("diagnosis").replaceChildren(...entries(state.diagnosis).map(([, one]) => make("li", {className: one.level},
    make("b", {}, one.level === "wrong" ? "Wrong: " : "Advice: "), one.sentence, " ", make("small", {}, one.evidence || ""),
    ...(one.remedy ? [" ", make("code", {}, one.remedy)] : []))));
  const figures = [["epoch", numbers.epochs ? `${whole(numbers.epoch)} of ${whole(numbers.epochs)}` : ""],
    ["samples", whole(numbers.samples)], ["samples/s", whole(numbers.rate)], ["test accuracy", percent(numbers.accuracy)],
    ["test loss", short(numbers.test_loss)], ["training loss", short(numbers.train_loss)],
    ["staleness", short(numbers.staleness)], ["sent", bytes(numbers.sent)], ["received", bytes(numbers.received)],
    ["shared memory", bytes(numbers.shared_memory)], ["time", known(run.seconds) ? clock(run.seconds) : ""]];
  const shown = figures.filter(([, text]) => text);
  if ($("numbers").children.length !== shown.length)
    $("numbers").replaceChildren(...shown.map(() => make("div", {}, make("dt"), make("dd"))));
  shown.forEach(([name, text], at) => {
    const [term, value] = $("numbers").children[at].children;
    write(term, name); write(value, text);
  });
  $("stop").hidden = !token || !run.running;
  showMembers(run);
  showShards();
  showStaleness();
  showEvents();
  if (!window.Plotly) requestAnimationFrame(loadCharts); else drawCharts();
};

const order = (a, b) => a[0].localeCompare(b[0], "en", {numeric: true});
const rowsOf = (table, names, made) => {
  const rows = new Map([...table.rows].map(row => [row.dataset.name, row]));
  const now = names.map(name => rows.get(name) || made(name));
  if (now.length !== table.rows.length || now.some((row, at) => row !== table.rows[at])) table.replaceChildren(...now);
  return now;
};
const rowOf = (name, ...cells) => {
  const row = make("tr", {}, make("th", {scope: "row"}, name), ...cells.map(kind => make("td", {className: kind})));
  row.dataset.name = name;
  return row;
};
const memberRow = name => {
  const row = rowOf(name, "", "", "more", "", "more", "band"), canvas = make("canvas");
  canvas.setAttribute("role", "img");
  row.lastChild.append(canvas);
  if (token && name.startsWith("replica")) row.firstChild.append(" ",
    make("button", {className: "kill", onclick: () => press("kill", name), ariaLabel: `Kill ${name}`}, "Kill"));
  return row;
};
const showMembers = run => {
  const members = entries(state.members).filter(([name]) => !name.startsWith("shard")).sort(order);
  const bands = state.bands || {}, until = run.at ?? run.seconds ?? 0;
  const since = Math.min(until, ...Object.values(bands).flatMap(band => Object.keys(band).map(Number)));
  write($("span"), `the last ${clock(until - since)}`);
  rowsOf($("members"), members.map(([name]) => name), memberRow).forEach((row, at) => {
    const [name, one] = members[at], [, doing, rate, stale, share, heard, band] = row.cells;
    const since_ = known(one.waited) && one.waits_for ? ` for ${short(one.waited)} s` : "";
    write(doing, one.gone ? "gone" : one.waits_for ? "waits" : one.state || "");
    doing.title = one.gone || (one.waits_for ? `waits for ${one.waits_for}${since_}` : "");
    write(rate, short(one.rate)); write(stale, short(one.staleness));
    write(share, percent(one.participation)); write(heard, known(one.heard) ? `${short(one.heard)} s` : "");
    drawBand(band.firstChild, name, numbered(bands[name]), since, until);
  });
};
const drawBand = (canvas, name, bins, since, until) => {
  const ratio = window.devicePixelRatio || 1, wide = canvas.clientWidth, high = canvas.clientHeight, sums = [0, 0, 0, 0, 0];
  canvas.width = wide * ratio; canvas.height = high * ratio;
  const pen = canvas.getContext("2d"), place = seconds => (seconds - since) / Math.max(1, until - since) * wide;
  const reasons = {};
  pen.scale(ratio, ratio);
  for (const [start, parts] of bins) {
    const left = Math.max(0, place(start)), right = Math.min(wide, place(start + parts[0]));
    if (right <= left) continue;
    let floor = high;
    PARTS.forEach((part, at) => {
      const tall = parts[at + 1] / 100 * high;
      sums[at] += parts[at + 1] * parts[0];
      pen.fillStyle = colour(part);
      pen.fillRect(left, floor - tall, right - left + .5, tall);
      floor -= tall;
    });
    if (parts[WAITS]) reasons[parts[WAITS]] = (reasons[parts[WAITS]] || 0) + parts[WAITS - 1] * parts[0];
  }
  const marks = numbered(state.marks).map(([, mark]) => mark).filter(mark => mark[1] === name && mark[0] >= since);
  pen.fillStyle = colour("ink"); pen.font = "bold 12px system-ui"; pen.textAlign = "center";
  for (const [seconds, , kind] of marks) {
    pen.fillRect(place(seconds) - .5, 0, 1, high);
    pen.fillText(SIGNS[kind] || "?", Math.max(6, Math.min(wide - 6, place(seconds))), 12);
  }
  const total = sums.reduce((a, b) => a + b, 0), most = entries(reasons).sort((a, b) => b[1] - a[1])[0];
  const words = DOING.map((doing, at) => sums[at] ? `${doing} ${percent(sums[at] / total)}` : "").filter(Boolean);
  const text = [words.join(", ") + (most ? `, mostly for ${most[0]}` : ""),
    ...marks.map(mark => `${mark[2]} at ${clock(mark[0])}`)].filter(Boolean).join("; ");
  label(canvas, `${name}: ${text || "nothing is known"}`);
  canvas.title = text;
};
const showShards = () => {
  const shards = entries(state.shards).sort(order);
  rowsOf($("shards"), shards.map(([name]) => name), name => rowOf(name, "", "", "last")).forEach((row, at) => {
    const [, version, pushes, holder] = row.cells, one = shards[at][1];
    write(version, whole(one.version)); write(pushes, short(one.pushes)); write(holder, one.waits_for || "");
  });
};
const showStaleness = () => {
  const bars = numbered(state.staleness), most = Math.max(1, ...bars.map(bar => bar[1]));
  $("staleness").replaceChildren(...bars.slice(0, 60).map(([value, count]) => {
    const bar = make("i");
    bar.style.height = `${80 * count / most}%`;
    return make("div", {title: `${whole(count)} pushes of staleness ${value}`}, bar, String(value));
  }));
  label($("staleness"), bars.map(([value, count]) => `${whole(count)} of staleness ${value}`).join(", ") || "no pushes");
};
let eventsShown = "";
const showEvents = () => {
  const events = numbered(state.events), newest = events.slice(-EVENTS).reverse();
  const key = `${events.length} ${(newest[0] || [])[0]}`;
  if (key === eventsShown) return;
  eventsShown = key;
  $("events").replaceChildren(...newest.map(([, [seconds, text, command]]) => make("li", {},
    make("span", {className: "dim"}, `${clock(seconds)} `), text, ...(command ? [" ", make("code", {}, command)] : []))));
};

// buttons

const press = async (name, role = "") => {
  const body = JSON.stringify({token, role});
  try {
    const answer = await fetch(`press/${name}`, {method: "POST", body});
    if (!answer.ok) return tell(await answer.text(), true);
    const got = await answer.json();
    token = got.token;
    tell(got.told);
  } catch { lost(); }
};
$("stop").onclick = () => { if (confirm("Stop the job? It keeps a checkpoint.")) press("stop"); };

// charts, loaded after the rest is painted

let colours = {}, over_ = "seconds", drawn = 0, due = 0;
const colour = name => colours[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const loadCharts = () => {
  if (document.getElementById("plotly")) return;
  document.head.append(make("script", {id: "plotly", src: "plotly.js", onload: () => drawCharts()}));
};
const drawCharts = () => {
  clearTimeout(due);
  const left = drawn + DRAW - performance.now();
  if (drawn && left > 0) { due = setTimeout(drawCharts, left); return; }
  drawn = performance.now();
  const bins = numbered(state.series);
  if (state.run && state.run.running) bins.pop();  // it is not over
  let sum = 0;
  const ends = bins.map(([start, row]) => [start + row[0], sum += row[1]]);
  const at = over_ === "seconds" ? ends.map(end => end[0]) : ends.map(end => end[1]);
  const column = number => bins.map(([, row]) => known(row[number]) ? row[number] : null);
  const speed = number => bins.map(([, row]) => row[number] / row[0]);
  const tests = numbered(state.measures).map(([, test]) => test), tested = tests.map(test => test[over_ === "seconds" ? 0 : 1]);
  const line = (name, x, y, shade, more = {}) =>
    ({name, x, y, mode: "lines", line: {color: colour(shade), width: 1.7}, hoverinfo: "x+y+name", ...more});
  const edge = {line: {width: 0}, showlegend: false, hoverinfo: "skip", yaxis: "y2"};
  const target = state.target || {}, goal = (y, yref) => ({type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, yref,
    line: {dash: "dash", width: 1, color: colour("dim")}});
  const shapes = [[target.accuracy, "y"], [target.loss, "y2"]].filter(one => one[0]).map(one => goal(...one));
  plot("learning", [line("least", at, column(2), "communicate", edge),
    line("most", at, column(4), "communicate", {...edge, fill: "tonexty", fillcolor: `${colour("communicate")}33`}),
    line("training loss", at, column(3), "communicate", {yaxis: "y2"}),
    line("test loss", tested, tests.map(test => test[3]), "load", {yaxis: "y2", line: {color: colour("load"), dash: "dot"}}),
    line("test accuracy", tested, tests.map(test => test[2]), "compute", {mode: "lines+markers", marker: {size: 5}})],
    {shapes, yaxis2: {overlaying: "y", side: "right", showgrid: false, rangemode: "tozero"}, yaxis: {tickformat: ".0%"}},
    `test accuracy ${percent(state.numbers?.accuracy) || "unknown"}, training loss ${short(state.numbers?.train_loss)}`);
  plot("rate", [line("samples a second", at, speed(1), "compute")], {showlegend: false},
    `${whole(state.numbers?.rate)} samples a second`);
  plot("bytes", ["sent", "received", "shared memory"].map((name, n) =>
    line(name, at, speed(5 + n), ["compute", "communicate", "load"][n])), {},
    `${bytes(state.numbers?.sent)} sent, ${bytes(state.numbers?.shared_memory)} through shared memory in all`);
};
const plot = (name, data, more, text) => {
  const axis = {gridcolor: colour("grid"), zerolinecolor: colour("line"), automargin: true};
  const clocked = over_ === "seconds" ? {ticksuffix: " s"} : {title: {text: "samples"}};
  Plotly.react(name, data, {margin: {l: 46, r: 46, t: 6, b: 26}, font: {color: colour("ink"), size: 11}, uirevision: over_,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", legend: {orientation: "h", y: 1.15}, ...more,
    xaxis: {...axis, ...clocked}, yaxis: {...axis, rangemode: "tozero", ...more.yaxis},
    ...(more.yaxis2 ? {yaxis2: {...axis, ...more.yaxis2}} : {})}, {responsive: true, displayModeBar: false});
  label($(name), text);
};
$("axis").onclick = () => {
  over_ = over_ === "seconds" ? "samples" : "seconds";
  $("axis").setAttribute("aria-pressed", over_ === "samples");
  drawn = 0; drawCharts();
};
matchMedia("(prefers-color-scheme:dark)").addEventListener("change", () => { colours = {}; drawn = 0; show(); });
addEventListener("resize", () => show());

history.replaceState(null, "", location.pathname);  // the cookie has the token now
$("legend").append(...PARTS.flatMap((part, at) => {
  const patch = make("i");
  patch.style.background = `var(--${part})`;
  return [patch, DOING[at]];
}), ...entries(SIGNS).slice(0, 4).map(([kind, sign]) => `  ${sign} ${kind}`));
listen();
