// Asks for the status again and again and shows it. Whatever comes is put in as text, never as markup.
"use strict";
const EVERY_MS = 1000;
const ASK_MAX_MS = 4000;
const SLOW_EVERY_MS = 3000;
const SLOW_MAX = 20;
const HISTORY_MAX = 180;
const MIB = 1048576;
const byId = (id) => document.getElementById(id);
const history = [];
let last = null;
let lostSince = null;

// --- figures as people read them ------------------------------------------------------------------
function digits(value) {
  if (value === 0 || value >= 99.95) return value.toFixed(0);
  return value.toFixed(value >= 9.995 ? 1 : 2);
}
function time(us) {
  if (us === null || us === undefined) return "-";
  if (us === 0) return "0";
  if (us < 999.5) return `${us.toFixed(0)} µs`;
  return us < 999500 ? `${digits(us / 1e3)} ms` : `${digits(us / 1e6)} s`;
}
function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit ? digits(count) : count} ${units[unit]}`;
}
const words = (state) => state.replaceAll("_", " ");

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// --- what happened between two looks --------------------------------------------------------------
// The middle of a class of latencies, in µs; upstairs/README.md has the classes.
function middle(index) {
  const shift = Math.max(0, (index >> 3) - 1);
  return (index - 8 * shift) * 2 ** shift + Math.floor(2 ** shift / 2);
}
function quantile(counts, part) {
  const all = counts.reduce((sum, count) => sum + count, 0);
  const wanted = Math.max(1, Math.ceil(all * part));
  let seen = 0;
  const found = counts.findIndex((count) => (seen += count) >= wanted);
  return found < 0 ? null : middle(found);
}
function rate(before, now, seconds) {
  const anew = now.reads < before.reads || now.writes < before.writes || now.others < before.others;
  const base = anew ? { reads: 0, read_bytes: 0, writes: 0, write_bytes: 0, others: 0, latencies: [] } : before;
  const counts = now.latencies.map((count, index) => Math.max(0, count - (base.latencies[index] ?? 0)));
  const per = (key) => (now[key] - base[key]) / seconds;
  const most = counts.findLastIndex((count) => count > 0);
  return {
    iops: per("reads") + per("writes") + per("others"),
    read: per("read_bytes") / MIB,
    write: per("write_bytes") / MIB,
    p50: quantile(counts, 0.5),
    p99: quantile(counts, 0.99),
    max: most < 0 ? null : middle(most),
  };
}
const NOTHING = { iops: 0, read: 0, write: 0, p50: null, p99: null, max: null };

function take(status) {
  const at = performance.now();
  let guests = NOTHING;
  let replicas = status.replicas.map(() => NOTHING);
  if (last && last.status.replicas.length === status.replicas.length) {
    const seconds = Math.max(0.001, (at - last.at) / 1e3);
    guests = rate(last.status.work, status.work, seconds);
    replicas = status.replicas.map((replica, index) => rate(last.status.replicas[index].work, replica.work, seconds));
    history.push({
      at,
      guests,
      replicas: replicas.map((of, index) => ({
        ...of,
        queue: status.replicas[index].queue_jobs,
        delay: status.replicas[index].read_delay_us,
      })),
    });
    if (history.length > HISTORY_MAX) history.shift();
  }
  last = { at, status };
  show(status, guests, replicas);
}

// --- the page -------------------------------------------------------------------------------------
function show(status, guests, rates) {
  document.title = `${status.name}: ${words(status.state)}`;
  byId("name").textContent = status.name;
  byId("state").textContent = words(status.state);
  byId("state").className = `badge ${status.state === "serving" ? "good" : "bad"}`;
  const reads = status.reads;
  byId("facts").textContent =
    `${bytes(status.size_bytes)}, generation ${status.generation}; reads: ${reads.policy}` +
    `${reads.cancel ? ", cancelled once answered" : ""}; throttle ${reads.throttle_enabled ? "on" : "off"}`;
  showNotes(status);
  const figures = [
    ["IOPS", digits(guests.iops)], ["read", `${digits(guests.read)} MiB/s`], ["write", `${digits(guests.write)} MiB/s`],
    ["p50", time(guests.p50)], ["p99", time(guests.p99)], ["max", time(guests.max)],
    ["in flight", `${status.jobs_in_flight} jobs, ${bytes(status.bytes_in_flight)}`],
    ["connections", status.guest_connections],
  ];
  byId("guests").replaceChildren(...figures.map(([name, value]) => {
    const figure = element("span", `${name} `, "soft");
    figure.append(element("b", value));
    return figure;
  }));
  byId("replicas").replaceChildren(...status.replicas.map((replica, index) => row(replica, rates[index])));
  showCurves();
  const scrub = status.scrub;
  byId("scrub").textContent = scrub.pass === 0 ? "" :
    `Scrub ${scrub.running ? `at ${scrub.extents_done} of ${scrub.extents_total} extents` : "finished"}: ` +
    `${scrub.blocks_bad} bad copies, ${scrub.blocks_healed} healed, ${scrub.blocks_without_good_copy} blocks without a good copy.`;
}

function showNotes(status) {
  const notes = [];
  if (status.reads.throttled) {
    notes.push(["warn", `Throttled: ${status.reads.cause ?? "a replica is slow"}; ${status.reads.waiting} reads wait, ` +
      `the oldest for ${time(status.reads.waiting_us)}`]);
  }
  for (const replica of status.replicas) {
    if (replica.faults) notes.push(["bad", `Replica ${replica.id}: faults put in on purpose: ${replica.faults}`]);
    if (replica.member === false) notes.push(["bad", `Replica ${replica.id}: its region is none of this volume's`]);
    const copy = replica.catch_up;
    if (copy && copy.extents_total > 0) {
      const left = copy.eta_s === null ? "" : `, about ${copy.eta_s} s left`;
      notes.push(["warn", `Replica ${replica.id}: ${copy.extents_done} of ${copy.extents_total} extents caught up${left}`]);
    }
    if (replica.reason) notes.push(["warn", `Replica ${replica.id}: ${replica.reason}`]);
  }
  byId("notes").replaceChildren(...notes.map(([kind, text]) => element("li", text, kind)));
}

function row(replica, rate) {
  const made = element("tr");
  const name = element("td", undefined, "text");
  name.append(element("i", undefined, `r${replica.id}`), String(replica.id));
  const kind = { active: "good", catching_up: "warn" }[replica.state] ?? "bad";
  const state = element("td", words(replica.state), `text ${kind}`);
  const copy = replica.catch_up;
  if (copy && copy.extents_total > 0) {
    const progress = element("progress");
    progress.max = copy.extents_total;
    progress.value = copy.extents_done;
    state.append(progress);
  }
  const figures = [
    digits(rate.iops), digits(rate.read + rate.write), time(rate.p50), time(rate.p99), time(rate.max), replica.queue_jobs,
    bytes(replica.queue_bytes), time(replica.read_lead_us ?? replica.lead_us), time(replica.read_delay_us), time(replica.ping_us),
    replica.reconnects, replica.healed_blocks,
  ];
  made.append(name, state, ...figures.map((figure) => element("td", figure)), element("td", replica.address, "text"));
  return made;
}

const ofReplicas = (value) => [0, 1, 2].map((id) => [`replica ${id}`, `r${id}`, (point) => value(point.replicas[id])]);
const PANELS = [
  ["Latency of guests' requests", time, [["p50", "p50", (point) => point.guests.p50], ["p99", "p99", (point) => point.guests.p99],
    ["max", "max", (point) => point.guests.max]]],
  ["Bandwidth of guests", (mib) => `${digits(mib)} MiB/s`, [["read", "read", (point) => point.guests.read],
    ["write", "write", (point) => point.guests.write]]],
  ["p99 of each replica's answers", time, ofReplicas((replica) => replica?.p99)],
  ["Jobs pending at each replica", (jobs) => jobs.toFixed(0), ofReplicas((replica) => replica?.queue)],
  ["IOPS at each replica", digits, ofReplicas((replica) => replica?.iops)],
  ["Delay put on reads to each replica", time, ofReplicas((replica) => replica?.delay)],
];
const LEFT = 76, RIGHT = 592, TOP = 8, BOTTOM = 128;

// `10.0 ms` is `10 ms`.
const round = (text) => text.replace(/\.0+(?= |$)|(\.\d*?[1-9])0+(?= |$)/, "$1");

// The next of 1, 2, 5, 10, 20 and so on.
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1, 2, 5].find((digit) => digit * power >= value * (1 - 1e-9)) ?? 10);
}

function curve([title, told, lines]) {
  const figure = element("figure");
  const caption = element("figcaption");
  caption.append(element("strong", title), ...lines.map(([name, kind]) => {
    const key = element("span", undefined, `key ${kind}`);
    key.append(element("i"), name);
    return key;
  }));
  const picture = svg("svg", { viewBox: "0 0 600 150", role: "img", "aria-label": title });
  const from = history.length ? history[0].at : 0;
  const span = Math.max(1, history.length ? history.at(-1).at - from : 1);
  const most = Math.max(0, ...history.flatMap((point) => lines.map(([, , value]) => value(point) ?? 0)));
  const step = nice((most || 1) / 3);
  const high = Math.max(step, Math.ceil(most / step) * step);
  const y = (value) => BOTTOM - (BOTTOM - TOP) * value / high;
  const x = (at) => LEFT + (RIGHT - LEFT) * (at - from) / span;
  for (let tick = 0; tick <= high * 1.0001; tick += step) {
    picture.append(svg("path", { class: "grid", d: `M${LEFT} ${y(tick)}H${RIGHT}` }));
    picture.append(svg("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, round(told(tick))));
  }
  picture.append(svg("text", { x: LEFT, y: BOTTOM + 16 }, `${(span / 1e3).toFixed(0)} s ago`));
  picture.append(svg("text", { x: RIGHT, y: BOTTOM + 16, "text-anchor": "end" }, "now"));
  for (const [, kind, value] of lines) {
    let path = "";
    let pen = "M";
    for (const point of history) {
      const at = value(point);
      if (at === null || at === undefined) {
        pen = "M";
        continue;
      }
      path += `${pen}${x(point.at).toFixed(1)} ${y(at).toFixed(1)}${pen === "M" ? "h.1" : ""}`;
      pen = "L";
    }
    if (path) picture.append(svg("path", { class: `line ${kind}`, d: path }));
  }
  figure.append(caption, picture);
  return figure;
}
function showCurves() {
  byId("curves").replaceChildren(...PANELS.map(curve));
}

// --- slow I/Os ------------------------------------------------------------------------------------
function slowItem(slow) {
  const made = element("li");
  const when = new Date(slow.received_unix_us / 1e3).toISOString().replace("T", " ").replace("Z", " UTC");
  made.append(element("div", slow.verdict?.text ?? "", "verdict"));
  made.append(element("div", `${time(slow.total_us)} for a ${slow.operation} of ${bytes(slow.length)} at ${slow.offset}` +
    `${slow.ended ? "" : ", still under way"}${slow.failed ? ", failed" : ""}; ${when}`, "soft"));
  const steps = Array.isArray(slow.steps) ? slow.steps.filter((step) => step.took_us > 0) : [];
  const whole = steps.reduce((sum, step) => sum + step.took_us, 0);
  if (whole > 0) {
    const bar = element("div", undefined, "bar");
    for (const step of steps) {
      const part = element("span", undefined, `s-${step.stage}`);
      part.style.width = `${100 * step.took_us / whole}%`;
      const where = step.replica === null ? "" : `replica ${step.replica}, `;
      part.title = `${where}${words(step.stage)}: ${time(step.took_us)}`;
      bar.append(part);
    }
    made.append(bar);
  }
  return made;
}
function showSlow(list) {
  const known = Array.isArray(list) ? list.filter((slow) => slow && typeof slow === "object") : [];
  const worst = known.toSorted((a, b) => b.total_us - a.total_us).slice(0, SLOW_MAX);
  byId("slow").replaceChildren(...worst.map(slowItem));
  byId("no-slow").hidden = worst.length > 0;
  const stages = new Set(worst.flatMap((slow) => (slow.steps ?? []).map((step) => step.stage)));
  byId("legend").replaceChildren(...[...stages].flatMap((stage) => [element("i", undefined, `s-${stage}`), words(stage)]));
}

// --- asking ---------------------------------------------------------------------------------------
async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(ASK_MAX_MS) });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}
async function again(path, every, handle, failed) {
  try {
    handle(await ask(path));
  } catch (error) {
    failed(error);
  }
  setTimeout(() => again(path, every, handle, failed), every);
}
again("status", EVERY_MS, (status) => {
  take(status);
  lostSince = null;
  byId("lost").hidden = true;
  document.querySelector("main").classList.remove("old");
}, (error) => {
  lostSince ??= performance.now();
  byId("lost").textContent = `No answer for ${((performance.now() - lostSince) / 1e3).toFixed(0)} s: what follows is old. (${error.message})`;
  byId("lost").hidden = false;
  document.querySelector("main").classList.add("old");
});
// An upstairs that doesn't trace has no such list.
again("slow", SLOW_EVERY_MS, showSlow, () => showSlow([]));
