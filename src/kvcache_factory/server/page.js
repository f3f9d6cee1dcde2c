"use strict";
// Reads /state every two seconds and shows it.  Everything is set as text: names of sessions are anybody's.

const EVERY_MS = 2000;
const SESSIONS = 50;
const byId = (id) => document.getElementById(id);
let chosen = null;
let shown = null;

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

const percent = (x) => (x === null || x === undefined ? "–" : (100 * x).toFixed(1) + " %");

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i += 1; }
  return (i && n < 100 ? n.toFixed(1) : Math.round(n)) + " " + units[i];
}

function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return Math.round(1000 * seconds) + " ms";
  if (seconds < 120) return seconds.toFixed(1) + " s";
  if (seconds < 7200) return Math.round(seconds / 60) + " min";
  return Math.round(seconds / 3600) + " h";
}

const count = (n) => Number(n).toLocaleString("en-US");

function line(svg, x1, y1, x2, y2, className) {
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, value] of Object.entries({ x1, y1, x2, y2 })) drawn.setAttribute(name, value);
  if (className) drawn.setAttribute("class", className);
  svg.append(drawn);
}

function draw(svg, samples, key, top, target) {
  svg.replaceChildren();
  const [width, height] = [600, 150];
  for (const share of [0, 0.5, 1]) line(svg, 0, height * share, width, height * share);
  if (target !== null) line(svg, 0, height * (1 - target / top), width, height * (1 - target / top), "target");
  if (!samples.length) return;
  const [from, to] = [samples[0].time_s, samples[samples.length - 1].time_s];
  const points = samples
    .filter((sample) => sample[key] !== null)
    .map((sample) => {
      const x = to > from ? (width * (sample.time_s - from)) / (to - from) : width;
      return x.toFixed(1) + "," + (height * (1 - Math.min(sample[key] / top, 1))).toFixed(1);
    });
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  drawn.setAttribute("points", points.join(" "));
  svg.append(drawn);
}

function lastOf(samples, key) {
  for (let i = samples.length - 1; i >= 0; i -= 1) if (samples[i][key] !== null) return samples[i][key];
  return null;
}

function showCharts(samples) {
  draw(byId("chart-hit"), samples, "hit_rate", 1, 0.95);
  const slowest = Math.max(0.01, ...samples.map((sample) => sample.ttft_s || 0));
  draw(byId("chart-ttft"), samples, "ttft_s", slowest, null);
  byId("hit-last").textContent = "last " + percent(lastOf(samples, "hit_rate")) + ", full height 100 %";
  byId("ttft-last").textContent = "last " + span(lastOf(samples, "ttft_s")) + ", full height " + span(slowest);
  const age = samples.length ? span(samples[samples.length - 1].time_s - samples[0].time_s) + " ago" : "–";
  for (const label of document.querySelectorAll(".axis .from")) label.textContent = age;
}

function tierRow(tier) {
  const row = make("div", undefined, "tier");
  const head = make("div", undefined, "head");
  const used = tier.budget_bytes ? tier.held_bytes / tier.budget_bytes : 0;
  head.append(make("strong", tier.tier));
  head.append(make("span", bytes(tier.held_bytes) + " of " + bytes(tier.budget_bytes) + " (" + percent(used) + ")"));
  const bar = make("div", undefined, "bar");
  const fill = make("i");
  fill.style.width = Math.min(100 * used, 100) + "%";
  bar.append(fill);
  const tags = make("div", undefined, "row");
  tags.append(make("span", "policy " + tier.policy, "badge"));
  if (tier.codec !== "none") tags.append(make("span", "codec " + tier.codec, "badge"));
  if (tier.prefaulted < 1) tags.append(make("span", "pre-faulted " + percent(tier.prefaulted), "badge"));
  for (const [name, open] of Object.entries(tier.breakers || {})) {
    tags.append(make("span", name + (open ? ": broken off" : ": works"), open ? "badge bad" : "badge good"));
  }
  const drop = make("button", "Drop");
  drop.addEventListener("click", () => act({ action: "drop_tier", tier: tier.tier }, "Drop every block of " + tier.tier + "?"));
  tags.append(drop);
  row.append(head, bar, tags);
  return row;
}

function remoteRow(remote) {
  const row = make("div", undefined, "tier");
  const head = make("div", undefined, "head");
  head.append(make("strong", remote.tier), make("span", remote.waiting_jobs + " jobs wait"));
  const tags = make("div", undefined, "row");
  const open = remote.breaker === "open" || remote.out_of_service;
  tags.append(make("span", String(remote.connector), "badge"));
  tags.append(make("span", open ? "calls: broken off" : "calls: work", open ? "badge bad" : "badge good"));
  row.append(head, tags);
  return row;
}

function sessionRow(session) {
  const row = make("tr");
  row.dataset.session = session.session;
  const reused = session.asked_tokens ? percent(session.reused_tokens / session.asked_tokens) : "–";
  const quota = session.quota_bytes === null ? "none" : bytes(session.quota_bytes);
  const cells = [session.session, bytes(session.bytes), quota, count(session.requests), reused, span(session.idle_s)];
  for (const text of cells) row.append(make("td", text));
  row.firstChild.title = session.session;
  const last = make("td");
  for (const [label, action] of [["Clear", "clear_session"], ["Destroy", "destroy_session"]]) {
    const button = make("button", label, action === "destroy_session" ? "danger" : "");
    button.addEventListener("click", () => act({ action, session: session.session }, label + " this session?"));
    last.append(button);
  }
  row.append(last);
  return row;
}

function showWarnings(warnings) {
  const list = byId("warnings");
  list.replaceChildren();
  for (const warning of [...warnings].reverse()) {
    list.append(make("li", new Date(1000 * warning.time_s).toLocaleTimeString() + "  " + warning.text));
  }
  if (!warnings.length) list.append(make("li", "none"));
}

function show(manager) {
  shown = manager;
  const engines = (manager.engines || []).filter((engine) => engine);
  const parts = manager.open || !engines.length ? [manager, ...engines] : engines;
  const sum = (key) => parts.reduce((total, part) => total + part[key], 0);
  const first = parts.flatMap((part) => part.durations).filter((row) => row.operation === "first_token");
  const answers = first.reduce((total, row) => total + row.count, 0);
  const reusable = sum("reusable_tokens");
  byId("hit-rate").textContent = percent(reusable ? sum("served_tokens") / reusable : null);
  byId("saved").textContent = count(sum("served_tokens"));
  byId("ttft").textContent = span(answers ? first.reduce((total, row) => total + row.sum_s, 0) / answers : null);
  byId("hits").textContent = manager.history.length ? Math.round(manager.history[manager.history.length - 1].hits_per_s) : "–";
  byId("num-sessions").textContent = count(manager.num_sessions);
  byId("requests").textContent = count(sum("leases"));
  byId("bypassed").hidden = !manager.bypassed;
  showCharts(manager.history);
  byId("tiers").replaceChildren(...parts.flatMap((part) => part.tiers).map(tierRow));
  byId("tiers").append(...parts.filter((part) => part.remote).map((part) => remoteRow(part.remote)));
  document.querySelector("#sessions tbody").replaceChildren(...manager.sessions.map(sessionRow));
  const more = manager.num_sessions > manager.sessions.length;
  byId("shown").textContent = more ? "the " + manager.sessions.length + " used last of " + manager.num_sessions : "";
  showWarnings(parts.flatMap((part) => part.warnings));
}

function choose(managers) {
  const select = byId("manager");
  const names = managers.map((manager) => manager.manager);
  if ([...select.options].map((option) => option.value).join("\n") !== names.join("\n")) {
    select.replaceChildren(...names.map((name) => { const o = make("option", name); o.value = name; return o; }));
  }
  if (!names.includes(chosen)) chosen = names[0];
  select.value = chosen;
  select.hidden = names.length < 2;
  return managers.find((manager) => manager.manager === chosen);
}

async function refresh() {
  const status = byId("status");
  try {
    const answer = await fetch("/state?sessions=" + SESSIONS, { cache: "no-store" });
    if (!answer.ok) throw new Error("status " + answer.status);
    const manager = choose((await answer.json()).managers);
    status.textContent = manager ? "live" : "no manager";
    status.className = "badge good";
    if (manager) show(manager);
  } catch (error) {
    status.textContent = "not reachable";
    status.className = "badge bad";
  }
}

async function act(order, question) {
  if (question && !window.confirm(question)) return;
  const outcome = byId("outcome");
  const answer = await fetch("/actions", {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: "Bearer " + byId("token").value },
    body: JSON.stringify({ do: order, manager: chosen }),
  });
  const said = await answer.json();
  outcome.textContent = said.error || order.action + ": done" + (said.result === null ? "" : " (" + said.result + ")");
  await refresh();
}

for (const button of document.querySelectorAll("button[data-do]")) {
  button.addEventListener("click", () => {
    const verb = button.dataset.do;
    if (verb === "evict") act({ action: "evict", blocks: 64 });
    else if (verb === "bypass") act({ action: "bypass", on: !shown.bypassed });
    else act({ action: "reset" }, "Drop every block and every session's history?");
  });
}
byId("manager").addEventListener("change", (event) => { chosen = event.target.value; refresh(); });

async function forever() {
  await refresh();
  window.setTimeout(forever, EVERY_MS);
}
forever();
