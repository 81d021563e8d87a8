"use strict";

// Polls /status and shows it. The API key, where one is asked for, stays in this tab's session storage.

const POLL_MS = 1000;
const ANSWER_MS = 5000;
const RATE_S = 5; // a rate is the mean over so long
const CHART_S = 180;
const KEY = "moe-runtime-api-key";
const PHASES = {
  serving: "good", running: "busy", idle: "good", starting: "warn", draining: "warn", drained: "warn",
  silent: "warn", unknown: "warn", failed: "bad", gone: "bad",
};

let samples = []; // {time_s, prompt, generation}, oldest first
let rates = []; // {time_s, prompt, generation} per second
let lastAnswer = null; // Date

function byId(id) { return document.getElementById(id); }

function show(id, text, value) {
  const element = byId(id);
  element.textContent = text;
  element.dataset.value = value ?? "";
}

function count(value) { return value === undefined || value === null ? "\u2013" : value.toLocaleString("en-US"); }

function rate(value) {
  return value === null ? "\u2013" : value.toLocaleString("en-US", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

function storedKey() {
  try { return sessionStorage.getItem(KEY); } catch { return null; }
}

function storeKey(key) {
  try {
    if (key === null) sessionStorage.removeItem(KEY); else sessionStorage.setItem(KEY, key);
  } catch { /* a browser without storage keeps it in the variable below */ }
}

let key = storedKey();

function badge(element, phase) {
  element.textContent = phase;
  element.className = `${element.classList.contains("badge") ? "badge " : ""}${PHASES[phase] || ""}`;
}

function ratesOf(status) {
  const now = { time_s: status.time_s, prompt: status.prompt_tokens_total, generation: status.generation_tokens_total };
  const last = samples[samples.length - 1];
  if (last && (now.time_s <= last.time_s || now.generation < last.generation)) { // another server
    samples = [];
    rates = [];
  }
  samples.push(now);
  while (samples.length > 2 && samples[1].time_s < now.time_s - RATE_S) samples.shift();
  const first = samples[0];
  const span = now.time_s - first.time_s;
  if (span <= 0) return { prompt: null, generation: null };
  const found = {
    time_s: now.time_s,
    prompt: (now.prompt - first.prompt) / span,
    generation: (now.generation - first.generation) / span,
  };
  rates.push(found);
  while (rates[0].time_s < now.time_s - CHART_S) rates.shift();
  return found;
}

function draw() {
  const end = rates.length ? rates[rates.length - 1].time_s : 0;
  const most = Math.max(1, ...rates.map((r) => Math.max(r.prompt, r.generation)));
  for (const name of ["prompt", "generation"]) {
    const points = rates.map((r) => {
      const x = 720 * (1 - (end - r.time_s) / CHART_S);
      return `${x.toFixed(1)},${(125 - 120 * r[name] / most).toFixed(1)}`;
    });
    byId(`${name}-line`).setAttribute("points", points.join(" "));
  }
  byId("chart-scale").textContent = `top line: ${rate(most)} tokens/s`;
}

function cell(row, field, text, value) {
  let found = row.querySelector(`[data-field="${field}"]`);
  if (!found) {
    found = document.createElement("td");
    found.dataset.field = field;
    row.append(found);
  }
  if (text !== null) found.textContent = text;
  if (value !== undefined) found.dataset.value = value;
  return found;
}

function bar(row, field, text, share, tick, value) {
  const found = cell(row, field, null, value);
  if (!found.firstChild) {
    const [line, label, track, fill, mark] = ["bar", "label", "track", "fill", "tick"].map((name) => {
      const part = document.createElement(name === "label" ? "span" : "div");
      part.className = name;
      return part;
    });
    track.append(fill, mark);
    line.append(label, track);
    found.append(line);
  }
  found.querySelector(".label").textContent = text;
  found.querySelector(".fill").style.width = `${(100 * share).toFixed(2)}%`;
  found.querySelector(".tick").hidden = tick === null;
  if (tick !== null) found.querySelector(".tick").style.left = `${(100 * tick).toFixed(2)}%`;
}

function showRank(row, rank, totalPairs, mostPairs, evenShare) {
  cell(row, "rank", String(rank.rank));
  badge(cell(row, "phase", null, rank.phase), rank.phase);
  cell(row, "num_running", count(rank.num_running), rank.num_running);
  cell(row, "num_waiting", count(rank.num_waiting), rank.num_waiting);
  const blocks = rank.kv_blocks || 0;
  bar(row, "kv_blocks_used", blocks ? `${count(rank.kv_blocks_used)} of ${count(blocks)}` : "\u2013",
    blocks ? rank.kv_blocks_used / blocks : 0, null, rank.kv_blocks_used);
  const pairs = rank.routed_pairs || 0;
  const share = totalPairs ? ` (${(100 * pairs / totalPairs).toFixed(1)}%)` : "";
  bar(row, "routed_pairs", `${count(rank.routed_pairs)}${share}`, mostPairs ? pairs / mostPairs : 0,
    mostPairs ? evenShare / mostPairs : null, pairs);
  cell(row, "num_computed_tokens", count(rank.num_computed_tokens), rank.num_computed_tokens);
  cell(row, "last_step_ms", rank.last_step_ms === undefined ? "\u2013" : `${rank.last_step_ms.toFixed(1)} ms`);
  const heard = rank.last_seen_s;
  cell(row, "last_seen_s", heard === undefined ? "never" : heard < 2 ? "now" : `${heard.toFixed(0)} s ago`);
  row.title = rank.pid === null ? "not started" : `pid ${rank.pid}${rank.device ? ` on ${rank.device}` : ""}`;
}

function showRanks(status) {
  const body = byId("ranks");
  while (body.rows.length > status.ranks.length) body.deleteRow(-1);
  const pairs = status.ranks.map((rank) => rank.routed_pairs || 0);
  const total = pairs.reduce((a, b) => a + b, 0);
  const most = Math.max(0, ...pairs);
  status.ranks.forEach((rank, i) => {
    const row = body.rows[i] || body.insertRow();
    row.dataset.rank = rank.rank;
    showRank(row, rank, total, most, total / status.ranks.length);
  });
}

function duration(seconds) {
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} days`;
}

function showStatus(status) {
  badge(byId("phase"), status.phase);
  document.title = `${status.phase}: ${status.model} - moe-runtime`;
  const facts = [
    status.model, `${status.world_size} rank${status.world_size === 1 ? "" : "s"}`,
    status.tp > 1 ? `tp ${status.tp}` : null, status.dtype, status.device,
    status.invariance ? `level ${status.invariance}` : null, status.system_fingerprint,
    `version ${status.version}`, `up ${duration(status.uptime_s)}`,
  ];
  byId("about").textContent = facts.filter((fact) => fact).join(" \u00b7 ");
  notice(status.reason);
  const now = ratesOf(status);
  for (const name of ["num_running", "num_waiting", "generation_tokens_total", "prompt_tokens_total"]) {
    show(name, count(status[name]), status[name]);
  }
  show("generation_rate", rate(now.generation), now.generation);
  show("prompt_rate", rate(now.prompt), now.prompt);
  const balance = status.expert_balancedness;
  show("expert_balancedness", balance === null ? "\u2013" : balance.toFixed(3), balance);
  draw();
  showRanks(status);
  byId("content").hidden = false;
  byId("links").hidden = key !== null; // a link cannot carry a key
  byId("updated").textContent = `Updated ${lastAnswer.toLocaleTimeString()}`;
}

function notice(text) {
  byId("notice").hidden = !text;
  byId("notice").textContent = text || "";
}

function askForKey(wasRefused) {
  badge(byId("phase"), "API key needed");
  byId("key-error").textContent = wasRefused ? "The server did not take this key." : "";
  byId("content").hidden = true;
  notice(null);
  key = null;
  storeKey(null);
  byId("key-form").hidden = false;
  byId("key").focus();
}

function showUnreachable() {
  badge(byId("phase"), "unreachable");
  byId("phase").classList.add("bad");
  const since = lastAnswer ? ` since ${lastAnswer.toLocaleTimeString()}; below is what was known then` : "";
  notice(`No answer from the server${since}. Trying again every second.`);
  for (const row of byId("ranks").rows) badge(cell(row, "phase", null, "unknown"), "unknown");
}

async function poll() {
  let response = null;
  let status = null;
  try {
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    response = await fetch("status", { headers, cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    if (response.ok) status = await response.json();
  } catch { /* shown below */ }
  if (response && response.status === 401) {
    askForKey(key !== null);
    return; // the form goes on
  }
  document.body.classList.toggle("is-stale", status === null);
  if (status === null) {
    showUnreachable();
  } else {
    lastAnswer = new Date();
    byId("key-form").hidden = true;
    showStatus(status);
  }
  setTimeout(poll, POLL_MS);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(key)) { // no header can carry it
    askForKey(true);
    return;
  }
  storeKey(key);
  byId("key-form").hidden = true;
  poll();
});

poll();
