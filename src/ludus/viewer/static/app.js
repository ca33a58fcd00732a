// The viewer. A page is a hash: #/rollouts?solved=0&sort=-reward, #/rollout/12, #/group/12, #/task?task=..., #/compare?a=...,
// #/pair/3/80, #/timeline/3, #/curves, #/labels. Text of models and tools is only ever a text node.
import { html, render, useState, useEffect, useRef } from "./vendor/htm-preact.js";
import uPlot from "./vendor/uplot.js";

const PAGE = 50;
const FILTERS = ["source", "training", "step", "task", "stop", "outcome", "solved", "tool", "min_reward", "max_reward",
  "min_tokens", "max_tokens", "text"];

async function load(path, options) {
  const response = await fetch(path, options);
  const data = await response.json().catch(() => ({ error: `The server answered ${response.status}.` }));
  if (!response.ok) throw new Error(data.error || response.statusText);
  return data;
}

function useData(path, deps) {
  const [state, set] = useState({});
  useEffect(() => {
    let gone = false;
    load(path).then((data) => gone || set({ path, data }), (error) => gone || set({ path, error }));
    return () => { gone = true; };
  }, deps || [path]);
  return state.path === path ? state : {};
}

function useHash() {
  const [hash, set] = useState(location.hash);
  useEffect(() => {
    const changed = () => { set(location.hash); scrollTo(0, 0); };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  const [path, query] = (hash.slice(1) || "/rollouts").split("?");
  return [path, new URLSearchParams(query)];
}

const go = (path, query) => { location.hash = query ? `${path}?${query}` : path; };
const number = (value, digits = 3) => value === null || value === undefined ? "" : Number(value.toPrecision(digits)).toString();
const verdict = (solved) => solved === null ? html`<span class="dim">unknown</span>`
  : solved ? html`<span class="good">solved</span>` : html`<span class="bad">failed</span>`;
const typing = (event) => ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);

function useKeys(handlers) {
  const latest = useRef(handlers);
  latest.current = handlers;
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (typing(event)) { if (event.key === "Escape") event.target.blur(); return; }
      const handler = latest.current[event.key];
      if (handler) { event.preventDefault(); handler(); }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

const Waiting = ({ error }) => error ? html`<p class="error">${error.message}</p>` : html`<p class="dim">Loading ...</p>`;
const Fact = ({ name, children }) => html`<span><span class="dim">${name} </span><b>${children}</b></span>`;

function Choice({ name, query, options, label = name }) {
  return html`<label>${label}<select name=${name}>
    <option value="">all</option>
    ${options.map(([value, text]) => html`<option value=${value} selected=${query.get(name) === String(value)}>${text}</option>`)}
  </select></label>`;
}

function Filters({ run, query }) {
  const change = (event) => {
    const next = new URLSearchParams();
    for (const [name, value] of new FormData(event.currentTarget.form || event.currentTarget)) if (value !== "") next.set(name, value);
    if (next.get("source") === "training") { next.delete("source"); next.set("training", "1"); }
    if (query.get("sort")) next.set("sort", query.get("sort"));
    go("/rollouts", next);
  };
  const same = (values) => values.filter((value) => value).map((value) => [value, value]);
  const source = new URLSearchParams(query);
  if (query.get("training")) source.set("source", "training");
  const field = (name, label, type = "number") => html`<label>${label}
    <input name=${name} type=${type} step="any" value=${query.get(name) || ""} onChange=${change} /></label>`;
  return html`<form class="filters" onChange=${change} onSubmit=${(event) => { event.preventDefault(); change(event); }}>
    <label>search<input id="search" name="text" type="search" placeholder="words in messages" value=${query.get("text") || ""} /></label>
    <${Choice} name="source" query=${source} label="from" options=${[["training", "training"], ...same(run.source)]} />
    <${Choice} name="step" query=${query} options=${same(run.steps.map(String))} />
    <${Choice} name="solved" query=${query} label="result" options=${[["1", "solved"], ["0", "failed"]]} />
    <${Choice} name="stop" query=${query} label="stop reason" options=${same(run.stop)} />
    <${Choice} name="tool" query=${query} options=${same(run.tools)} />
    <${Choice} name="outcome" query=${query} options=${same(run.outcome)} />
    ${field("task", "task", "text")} ${field("min_reward", "reward from")} ${field("max_reward", "reward to")}
    ${field("min_tokens", "tokens from")} ${field("max_tokens", "tokens to")}
    <label>${" "}<button type="button" onClick=${() => go("/rollouts")}>clear</button></label>
  </form>`;
}

const COLUMNS = [["step", "step", 1], ["task", "task", 0], ["sample", "sample", 1, "wide"], ["reward", "reward", 1],
  ["solved", "result", 0], ["stop", "stop reason", 0, "wide"], ["turns", "turns", 1, "wide"], ["tokens", "tokens", 1],
  ["calls", "calls", 1, "wide"], ["errors", "errors", 1, "wide"], ["advantage", "advantage", 1, "wide"], ["answer", "answer", 0, "wide"]];

function Rollouts({ run, query }) {
  const sort = query.get("sort") || "id", offset = Number(query.get("offset") || 0);
  const sent = new URLSearchParams([...query].filter(([name]) => FILTERS.includes(name)));
  sent.set("sort", sort); sent.set("offset", offset); sent.set("limit", PAGE);
  const { data, error } = useData(`/api/rollouts?${sent}`, [`${sent} ${run.total}`]);
  const [at, move] = useState(0);
  useEffect(() => move(0), [String(sent)]);
  const rows = data ? data.rows : [];
  const page = (to) => { const next = new URLSearchParams(query); next.set("offset", Math.max(0, to)); go("/rollouts", next); };
  const forward = () => data && offset + PAGE < data.total && page(offset + PAGE);
  useKeys({
    j: () => move(Math.min(at + 1, rows.length - 1)), k: () => move(Math.max(at - 1, 0)),
    Enter: () => rows[at] && go(`/rollout/${rows[at].id}`), "/": () => document.getElementById("search").focus(),
    n: forward, p: () => offset && page(offset - PAGE), g: () => rows[at] && go(`/group/${rows[at].id}`),
  });
  const order = (name) => { const next = new URLSearchParams(query); next.delete("offset"); next.set("sort", sort === `-${name}` ? name : `-${name}`); go("/rollouts", next); };
  const cell = (row, name) => name === "solved" ? verdict(row.solved)
    : name === "step" && row.source ? `${row.step} (evaluation)` : typeof row[name] === "number" ? number(row[name], 4) : row[name];
  return html`<${Filters} run=${run} query=${query} key=${String(query)} />
    ${!data ? html`<${Waiting} error=${error} />` : html`
    <div class="scroll"><table><thead><tr>${COLUMNS.map(([name, text, right, wide]) => html`
      <th class="${right ? "number " : ""}${wide || ""}" onClick=${() => order(name)}>${text}${sort === name ? " ↑" : sort === `-${name}` ? " ↓" : ""}</th>`)}
    </tr></thead><tbody>${rows.map((row, i) => html`<tr class=${i === at ? "chosen" : ""} onClick=${() => go(`/rollout/${row.id}`)}>
      ${COLUMNS.map(([name, , right, wide]) => html`<td class="${right ? "number " : ""}${wide || ""}">${cell(row, name)}</td>`)}</tr>`)}
    </tbody></table></div>
    <div class="pager"><span>${data.total ? `${offset + 1} to ${offset + rows.length} of ${data.total.toLocaleString("en")}` : "No rollout matches."}</span>
      <button disabled=${!offset} onClick=${() => page(offset - PAGE)}>previous</button>
      <button disabled=${offset + PAGE >= data.total} onClick=${forward}>next</button>
      <span class="dim wide">keys: j k Enter, n p, g group, / search, Esc back</span></div>`}`;
}

function Message({ message }) {
  return html`<div class="message ${message.role}"><span class="role">${message.role}${message.name ? ` ${message.name}` : ""}</span>
    ${message.thought ? html`<pre class="thought">${message.thought}</pre>` : ""}
    ${message.content ? html`<pre>${message.content}</pre>` : ""}
    ${message.calls.map((call) => html`<pre class="call">${call.name} ${call.arguments}</pre>`)}</div>`;
}

const COLORS = {
  probability: { legend: "probability of the sampled token under the engine", value: (segment, i) => segment.logprobs[i], ends: [[Math.log(0.9), "p0", "≥ 0.9"], [Math.log(0.5), "p1", "≥ 0.5"], [Math.log(0.2), "p2", "≥ 0.2"], [Math.log(0.05), "p3", "≥ 0.05"], [Math.log(0.01), "p4", "≥ 0.01"], [-Infinity, "p5", "lower"]] },
  entropy: { legend: "entropy of the policy in nats", value: (segment, i) => -segment.trained.entropy[i], ends: [[-0.1, "p0", "≤ 0.1"], [-0.5, "p1", "≤ 0.5"], [-1, "p2", "≤ 1"], [-2, "p3", "≤ 2"], [-3, "p4", "≤ 3"], [-Infinity, "p5", "higher"]] },
  mismatch: { legend: "|learner − engine| of the log-probability", value: (segment, i) => -Math.abs(segment.trained.old[i] - segment.logprobs[i]), ends: [[-1e-4, "p0", "≤ 0.0001"], [-1e-3, "p1", "≤ 0.001"], [-1e-2, "p2", "≤ 0.01"], [-0.1, "p3", "≤ 0.1"], [-1, "p4", "≤ 1"], [-Infinity, "p5", "higher"]] },
  advantage: { legend: "advantage", value: (segment, i) => segment.trained.advantage[i], ends: [[1, "p0", "≥ 1"], [1e-9, "p1", "> 0"], [0, "p2", "0"], [-1, "p3", "≥ −1"], [-2, "p4", "≥ −2"], [-Infinity, "p5", "lower"]] },
};
const level = (color, segment, i) => { const value = color.value(segment, i); return color.ends.find(([least]) => value >= least)[1]; };

function tokenFacts(segment, i, advantage) {
  const facts = [`${segment.kind}, turn ${segment.turn}`, `id ${segment.ids[i]}`], logprob = segment.logprobs[i], trained = segment.trained;
  if (logprob === undefined) return facts;
  facts.push(`log-probability ${logprob.toFixed(4)} (p ${Math.exp(logprob).toPrecision(3)})`, `weights ${segment.versions[i]}`);
  if (!trained || trained.advantage[i] === null) return [...facts, trained ? "not in the loss" : `advantage ${advantage === null ? "none" : number(advantage, 4)}`];
  facts.push(`learner at the start of the step ${trained.old[i].toFixed(4)}, in the update ${trained.logprob[i].toFixed(4)}`, `ratio ${Math.exp(trained.logprob[i] - trained.old[i]).toFixed(4)}${trained.clipped && trained.clipped[i] ? ", clipped" : ""}`);
  if (trained.reference) facts.push(`reference ${trained.reference[i].toFixed(4)}`);
  if (trained.entropy) facts.push(`entropy ${trained.entropy[i].toFixed(4)} nats`);
  return [...facts, `advantage ${number(trained.advantage[i], 4)}`];
}

function Token({ segment, i, advantage, color }) {
  const colored = segment.logprobs[i] !== undefined && (color === COLORS.probability || (segment.trained && segment.trained.advantage[i] !== null));
  const clipped = segment.trained && segment.trained.clipped && segment.trained.clipped[i] ? " clipped" : "";
  return html`<span class="token ${colored ? level(color, segment, i) : ""}${clipped}" title=${tokenFacts(segment, i, advantage).join("\n")}>${segment.texts[i].replaceAll("\n", "⏎\n")}</span>`;
}

function Tokens({ data }) {
  const [exact, show] = useState(""), [name, choose] = useState("probability");
  if (!data.segments.length) return html`<p class="dim">An endpoint returns text, not tokens.</p>`;
  const trained = data.segments.find((segment) => segment.trained), color = COLORS[name];
  const names = Object.keys(COLORS).filter((one) => one === "probability" || (trained && (one !== "entropy" || trained.trained.entropy)));
  return html`<p class="legend dim">${names.map((one) => html`<button class=${one === name ? "on" : ""} onClick=${() => choose(one)}>${one}</button>${" "}`)}${color.legend}:
      ${color.ends.map(([, style, text]) => html`<span class="token ${style}">${text}</span>`)}
      ${trained ? "Underlined tokens are clipped." : "With run.token_values a run also stores the values of the learner and the reference."}</p>
    ${exact ? html`<p class="exact">${exact}</p>` : ""}
    ${data.rows.map((one, n) => html`<p class="dim">row ${n} ${one.recorded ? `forks from row ${one.of} after ${one.recorded} tokens` : "has a new prompt"}${one.shared ? html`; ${one.shared} tokens equal those of row ${one.of}, which continues with <code>${one.before || "its end"}</code>, and row ${n} with <code>${one.after || "its end"}</code>` : ""}</p>`)}
    <div class="tokens" onClick=${(event) => show(event.target.title || "")}>${data.segments.map((segment, n) => html`
      <div class="segment ${segment.kind} ${segment.parent !== null && segment.parent !== n - 1 ? "branch" : ""}">
        <span class="dim">${segment.kind}, turn ${segment.turn}, ${segment.ids.length} tokens${segment.agent !== "policy" ? `, ${segment.agent}` : ""}${segment.policy ? `, adapter ${segment.policy}` : ""}${segment.parent !== null && segment.parent !== n - 1 ? `, branches after segment ${segment.parent}` : ""}</span><br />
        ${segment.ids.map((_, i) => html`<${Token} segment=${segment} i=${i} advantage=${data.row.advantage} color=${color} />`)}
      </div>`)}</div>`;
}

function Probes() {
  const { data, error } = useData("/api/probes");
  if (!data) return html`<${Waiting} error=${error} />`;
  if (!data.length) return html`<p class="dim">No probe is stored. <code>ludus probe forks --run RUN</code> finds tokens at which the trained and the initial model differ, <code>ludus probe counterfactuals --run RUN</code> the value of each turn; docs/use/evaluation.md lists the others.</p>`;
  const cell = (name, text) => name === "task" ? html`<a href=${`#/task?${new URLSearchParams({ task: text })}`}>${text}</a>` : text;
  return data.map((one) => html`<h2>${one.title}</h2><p class="dim">${one.name}</p>
    <div class="scroll"><table><thead><tr>${Object.keys(one.rows[0] || {}).map((name) => html`<th>${name}</th>`)}</tr></thead>
    <tbody>${one.rows.map((row) => html`<tr>${Object.entries(row).map(([name, text]) => html`<td>${cell(name, text)}</td>`)}</tr>`)}</tbody></table></div>
    ${one.note.split("\n\n").map((note) => html`<p>${note}</p>`)}
    ${one.texts.map((text) => html`<p class="dim">${cell("task", text.name)}</p><div class="tokens"><div class="segment">${text.spans.map(([part, note]) => note ? html`<mark title=${note}>${part}</mark>` : part)}</div></div>`)}`);
}

const random = () => load("/api/unlabelled").then((found) => go(found.id === null ? "/labels" : `/rollout/${found.id}`, found.id === null ? "" : "blind=1"), () => go("/labels"));

function Label({ id, label, saved }) {
  const [note, write] = useState(label ? label.note : "");
  const [error, fail] = useState(null);
  const send = (value) => load(`/api/label/${id}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ label: value, note }) }).then(saved, fail);
  return html`<div class="facts"><span class="dim">your label</span>
    ${["right", "wrong"].map((value) => html`<button class=${label && label.label === value ? "on" : ""} onClick=${() => send(value)}>${value}</button>`)}
    <input placeholder="note" value=${note} onInput=${(event) => write(event.target.value)} />${error ? html`<span class="bad">${error.message}</span>` : ""}</div>`;
}

function Rollout({ id, query }) {
  const [turn, again] = useState(0);
  const { data, error } = useData(`/api/rollout/${id}`, [`${id} ${turn}`]);
  const view = query.get("view") || "messages";
  const blind = query.get("blind") && data && !data.label;
  const step = (by) => { if (!data) return; const next = data.group[data.group.indexOf(Number(id)) + by]; if (next) go(`/rollout/${next}`, query.toString()); };
  const show = (name) => go(`/rollout/${id}`, name === "messages" ? "" : `view=${name}`);
  useKeys({ j: () => step(1), k: () => step(-1), t: () => show(view === "tokens" ? "messages" : "tokens"), g: () => go(`/group/${id}`), r: random, Escape: () => history.back() });
  if (!data) return html`<${Waiting} error=${error} />`;
  const { row } = data;
  return html`<h2>${row.task}, sample ${row.sample}</h2>
    <div class="facts"><${Fact} name="step">${row.step}<//>${row.source ? html`<${Fact} name="evaluation">${row.source}<//>` : ""}
      ${blind ? html`<span class="dim">The result is shown after your label.</span>` : html`<${Fact} name="result">${verdict(row.solved)}<//><${Fact} name="reward">${number(row.reward, 4)}<//>
      ${Object.entries(data.rewards).map(([name, value]) => html`<${Fact} name=${name}>${number(value, 4)}<//>`)}
      <${Fact} name="advantage">${row.advantage === null ? "none" : number(row.advantage, 4)}<//><${Fact} name="stop">${row.stop}<//>
      <${Fact} name="ledger">${row.outcome}${data.reason !== row.outcome ? ` (${data.reason})` : ""}<//>`}
      ${Object.entries(data.tags).map(([name, value]) => html`<${Fact} name=${name}>${value}<//>`)}</div>
    ${data.failure ? html`<p class="error">failed in the ${data.failure.part}: ${data.failure.error}</p>` : ""}
    <p><button class=${view === "messages" ? "on" : ""} onClick=${() => show("messages")}>messages</button>${" "}
      <button class=${view === "tokens" ? "on" : ""} onClick=${() => show("tokens")}>tokens</button>${" "}
      <a href="#/group/${id}">group of ${data.group.length}</a>${" · "}<a href=${`#/task?${new URLSearchParams({ task: row.task })}`}>task through training</a>
      <span class="dim wide">${" · "}keys: j k next and previous in the group, t tokens, g group, r random rollout without a label, Esc back</span></p>
    <${Label} id=${id} label=${data.label} saved=${() => again(turn + 1)} key=${id} />
    ${view === "tokens" ? html`<${Tokens} data=${data} />` : data.paths.map((path, n) => html`
      ${data.paths.length > 1 ? html`<h2>branch ${n}: reward ${number(path.reward, 4)}, ${path.stop}</h2>` : ""}
      ${path.messages.map((message) => html`<${Message} message=${message} />`)}`)}`;
}

function Group({ id }) {
  const { data, error } = useData(`/api/group/${id}`);
  useKeys({ Escape: () => history.back() });
  if (!data) return html`<${Waiting} error=${error} />`;
  return html`<h2>${data.task}, step ${data.step}: ${data.members.length} rollouts, best first</h2>
    <${Sides} members=${data.members} first="the best" title=${(row) => `sample ${row.sample}`} />`;
}

function Sides({ members, first, title }) {
  return html`<div class="side">${members.map((member, n) => html`<section>
      <div class="facts"><a href="#/rollout/${member.row.id}">${title(member.row)}</a>${verdict(member.row.solved)}
        <${Fact} name="reward">${number(member.row.reward, 4)}<//><${Fact} name="advantage">${number(member.row.advantage, 3) || "none"}<//>
        <span class="dim">${n === 0 ? first : member.differs ? `differs from ${first} at token ${member.differs.token}, turn ${member.differs.turn}` : `equal to ${first}`}</span></div>
      ${member.messages.map((message) => html`<${Message} message=${message} />`)}</section>`)}</div>`;
}

function Pair({ a, b }) {
  const { data, error } = useData(`/api/pair/${a}/${b}`);
  useKeys({ Escape: () => history.back() });
  if (!data) return html`<${Waiting} error=${error} />`;
  return html`<h2>${data.task}</h2><${Sides} members=${data.members} first="the first" title=${(row) => row.source || `step ${row.step}, sample ${row.sample}`} />`;
}

const CHANGES = { gained: (by) => by > 0, lost: (by) => by < 0, equal: (by) => by === 0 };
const SHOWN = 500;

function Compare({ run, query }) {
  const names = run.source.filter((name) => name), suite = (name) => name.replace(/^step-\d+-/, "");
  const a = query.get("a") || names[0], b = query.get("b") || names.filter((name) => suite(name) === suite(a)).pop();
  const { data, error } = useData(`/api/compare?${new URLSearchParams({ a, b })}`, [`${a} ${b} ${run.total}`]);
  const [at, move] = useState(0), only = query.get("only") || "";
  useEffect(() => move(0), [String(query)]);
  const by = (row) => (row.solved_b - row.solved_a) || (row.solved_a === null ? row.reward_b - row.reward_a : 0);
  const all = data ? data.tasks : [], counts = Object.entries(CHANGES).map(([name, test]) => [name, all.filter((row) => test(by(row))).length]);
  const rows = all.filter((row) => !only || CHANGES[only](by(row))).sort((x, y) => Math.abs(by(y)) - Math.abs(by(x))).slice(0, SHOWN);
  const open = (row) => row && go(`/pair/${row.first_a}/${row.first_b}`);
  useKeys({ j: () => move(Math.min(at + 1, rows.length - 1)), k: () => move(Math.max(at - 1, 0)), Enter: () => open(rows[at]), Escape: () => history.back() });
  if (names.length < 2) return html`<p>The run has fewer than two evaluations with rollouts.</p>`;
  if (!data) return html`<${Waiting} error=${error} />`;
  const change = (event) => go("/compare", new URLSearchParams([...new FormData(event.currentTarget)].filter(([, value]) => value)));
  const choice = (name, value) => html`<label>${name}<select name=${name}>${names.map((one) => html`<option selected=${one === value}>${one}</option>`)}</select></label>`;
  const rate = (value) => value === null ? "unknown" : `${(100 * value).toFixed(0)} %`, found = data.difference;
  return html`<form class="filters" onChange=${change}>${choice("a", a)} ${choice("b", b)}
      <${Choice} name="only" query=${query} label="tasks" options=${counts.map(([name, count]) => [name, `${name} (${count})`])} /></form>
    ${found ? html`<p>Success changes by <b>${(100 * found.mean).toFixed(1)}</b> points from a to b [${(100 * found.low).toFixed(1)}, ${(100 * found.high).toFixed(1)}],
      over ${all.length} tasks${found.p_value === null ? "" : html`; McNemar's p ${number(found.p_value, 2)}`}.
      Tasks: ${counts.map(([name, count]) => `${count} ${name}`).join(", ")}.</p>`
      : html`<p>${all.length ? "The success of these rollouts is unknown, or they share one task." : "These evaluations share no task."}</p>`}
    ${rows.length ? html`<div class="scroll"><table><thead><tr><th>task</th><th class="number">success a</th><th class="number">success b</th><th class="number wide">reward a</th><th class="number wide">reward b</th></tr></thead>
    <tbody>${rows.map((row, i) => html`<tr class=${i === at ? "chosen" : ""} onClick=${() => open(row)}><td>${row.task}</td><td class="number">${rate(row.solved_a)}</td>
      <td class="number ${by(row) > 0 ? "good" : by(row) < 0 ? "bad" : ""}">${rate(row.solved_b)}</td><td class="number wide">${number(row.reward_a)}</td><td class="number wide">${number(row.reward_b)}</td></tr>`)}</tbody></table></div>
    ${rows.length === SHOWN ? html`<p class="dim">The ${SHOWN} largest changes are shown.</p>` : ""}` : ""}`;
}

function Task({ query }) {
  const task = query.get("task") || "";
  const { data, error } = useData(`/api/task?${new URLSearchParams({ task })}`);
  useKeys({ Escape: () => history.back() });
  if (!data) return html`<${Waiting} error=${error} />`;
  return html`<h2>${task}</h2>${data.length ? "" : html`<p>There is no rollout of this task.</p>`}
    <div class="scroll"><table><thead><tr><th class="number">step</th><th>from</th><th class="number">rollouts</th><th class="number">solved</th><th class="number">reward</th><th class="number">tokens</th><th class="number">calls</th></tr></thead>
    <tbody>${data.map((row) => html`<tr onClick=${() => go(`/group/${row.first}`)}><td class="number">${row.step}</td><td>${row.source || "training"}</td><td class="number">${row.attempts}</td>
      <td class="number">${row.solved === null ? "unknown" : `${(100 * row.solved).toFixed(0)} %`}</td><td class="number">${number(row.reward)}</td><td class="number">${number(row.tokens)}</td><td class="number">${number(row.calls)}</td></tr>`)}</tbody></table></div>`;
}

function Chart({ name, steps, values, alarms }) {
  const place = useRef(null);
  useEffect(() => {
    const style = getComputedStyle(document.documentElement), color = (key) => style.getPropertyValue(key).trim();
    const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
    const mark = (plot) => {
      plot.ctx.strokeStyle = color("--red");
      for (const alarm of alarms) {
        const x = plot.valToPos(alarm.step, "x", true);
        plot.ctx.beginPath(); plot.ctx.moveTo(x, plot.bbox.top); plot.ctx.lineTo(x, plot.bbox.top + plot.bbox.height); plot.ctx.stroke();
      }
    };
    const options = { width: place.current.clientWidth, height: 180, scales: { x: { time: false } }, axes: [{ ...axis, size: 28 }, { ...axis, size: 60 }],
      hooks: { draw: [mark] }, series: [{ label: "step" }, { label: "value", stroke: color("--blue"), width: 1.5, spanGaps: true }] };
    const plot = new uPlot(options, [steps, values], place.current);
    return () => plot.destroy();
  }, [values]);
  return html`<div><h3>${name}</h3><div ref=${place}></div></div>`;
}

const FIRST = ["reward/mean", "success/mean", "entropy/mean", "response_length/mean", "loss/total", "gradient/norm", "kl/mean"];

function Curves({ run }) {
  const { data, error } = useData("/api/curves", [run.total]);
  const [words, search] = useState("");
  useKeys({ "/": () => document.getElementById("search").focus() });
  if (!data) return html`<${Waiting} error=${error} />`;
  const names = Object.keys(data.values), chosen = words ? names.filter((name) => name.includes(words))
    : [...names.filter((name) => FIRST.includes(name) || name.startsWith("eval/")), ...names.filter((name) => !FIRST.includes(name) && !name.startsWith("eval/"))];
  return html`<p><input id="search" type="search" placeholder="name of a metric" value=${words} onInput=${(event) => search(event.target.value)} />
      <span class="dim"> ${chosen.length} of ${names.length} metrics, the first 24 are drawn; red lines: an alarm begins</span></p>
    ${data.alarms.length ? html`<ul>${data.alarms.map((alarm) => html`<li><b>step ${alarm.step}, ${alarm.name}</b>: ${alarm.cause}: ${alarm.evidence}. ${alarm.remedy}</li>`)}</ul>` : ""}
    <div class="charts">${chosen.slice(0, 24).map((name) => html`<${Chart} key=${name} name=${name} steps=${data.steps} values=${data.values[name]} alarms=${data.alarms} />`)}</div>`;
}

const SPANS = [["model", "generation", "--blue"], ["tools", "environment and tools", "--yellow"], ["wait", "waiting for rewards", "--line"], ["grade", "rewards", "--green"]];

function spansOf(line, start) {
  const spans = [], turns = line.turns.length ? line.turns : [[line.model_s, line.tools_s]];
  let at = line.begin - start;
  const add = (kind, seconds) => { if (seconds > 0) spans.push({ kind, at, seconds }); at += seconds; };
  for (const [model, tools] of turns) { add("model", model); add("tools", tools); }
  at = Math.max(at, line.begin - start + line.total_s);
  add("wait", line.scoring_s - line.grading_s); add("grade", line.grading_s);
  return { spans, end: at };
}

function ticks(end) {
  const raw = (end || 1) / 8, power = 10 ** Math.floor(Math.log10(raw)), size = [1, 2, 5, 10].find((one) => one * power >= raw) * power;
  return Array.from({ length: Math.floor(end / size) + 1 }, (_, i) => i * size);
}

function Timeline({ run, step }) {
  const { data, error } = useData(`/api/timeline/${step}`);
  const steps = run.steps, near = (by) => { const next = steps[steps.indexOf(Number(step)) + by]; if (next !== undefined) go(`/timeline/${next}`); };
  useKeys({ j: () => near(1), k: () => near(-1), Escape: () => history.back() });
  if (!data) return html`<${Waiting} error=${error} />`;
  const choose = html`<label class="dim">step <select onChange=${(event) => go(`/timeline/${event.target.value}`)}>${steps.map((one) => html`<option selected=${one === Number(step)}>${one}</option>`)}</select></label>`;
  if (!data.length) return html`<p>${choose}</p><p>The times of this step's episodes are not stored.</p>`;
  const start = Math.min(...data.map((line) => line.begin)), lines = data.map((line) => ({ line, ...spansOf(line, start) }));
  const end = Math.max(...lines.map((one) => one.end)), seconds = lines.map((one) => one.line.total_s + one.line.scoring_s).sort((a, b) => a - b);
  const middle = seconds[Math.floor(seconds.length / 2)], slow = 2 * middle, width = 900, height = 12 * lines.length + 4;
  const title = ({ line }) => `${line.task}, sample ${line.sample}: ${number(line.total_s)} s, model ${number(line.model_s)} s, tools ${number(line.tools_s)} s, rewards ${number(line.scoring_s)} s`;
  return html`<p>${choose} <span class="dim">${data.length} episodes in ${number(end)} s; median ${number(middle)} s, slowest ${number(seconds[seconds.length - 1])} s; red: more than twice the median</span></p>
    <p class="legend dim">${SPANS.map(([, text, color]) => html`<svg width="12" height="10"><rect width="10" height="10" fill="var(${color})" /></svg> ${text}${" "}`)}</p>
    <div class="scroll"><svg class="timeline" viewBox="0 0 ${width + 10} ${height + 18}" width=${width + 10} height=${height + 18}>
      ${ticks(end).map((second) => html`<line x1=${(width * second) / end} x2=${(width * second) / end} y1="0" y2=${height} stroke="var(--line)" />
        <text x=${(width * second) / end + 3} y=${height + 13}>${number(second)} s</text>`)}
      ${lines.map((one, i) => html`<g onClick=${() => go(`/rollout/${one.line.row.id}`)}><title>${title(one)}</title>
        <rect x="0" y=${12 * i} width=${width} height="12" fill="transparent" />
        ${one.line.total_s + one.line.scoring_s > slow ? html`<rect x=${(width * (one.line.begin - start)) / end - 3} y=${12 * i + 2} width="3" height="9" fill="var(--red)" />` : ""}
        ${one.spans.map((span) => html`<rect x=${(width * span.at) / end} y=${12 * i + 2} width=${Math.max(0.5, (width * span.seconds) / end)} height="9" fill="var(${SPANS.find(([kind]) => kind === span.kind)[2]})" />`)}</g>`)}
    </svg></div>`;
}

function Labels() {
  const { data, error } = useData("/api/labels");
  useKeys({ r: random });
  if (!data) return html`<${Waiting} error=${error} />`;
  const found = data.agreement;
  return html`<h2>${data.labels.length} labels</h2>
    <p class="dim">Label rollouts on their pages. They are stored in labels.jsonl in the run folder; the last label of a rollout counts.
      For an unbiased agreement, label random rollouts before you see their result.</p>
    <p><button onClick=${random}>label a random rollout</button>${" "}<a href="/api/labels" download="labels.json">export as JSON</a></p>
    ${found ? html`<p>Agreement with the verifier: kappa <b>${found.kappa === null ? "undefined" : found.kappa.toFixed(2)}</b> [${found.low.toFixed(2)}, ${found.high.toFixed(2)}].
      Both accept ${found.counts[0]}, only you ${found.counts[1]}, only the verifier ${found.counts[2]}, neither ${found.counts[3]}.</p>` : ""}
    <div class="scroll"><table><tbody>${data.labels.map((one) => html`<tr><td>${one.label}</td><td>${verdict(one.solved)}</td><td>${one.task}</td><td class="number">step ${one.step}</td><td>${one.note}</td></tr>`)}</tbody></table></div>`;
}

function App() {
  const [path, query] = useHash();
  const [beat, next] = useState(0);
  const { data: run, error } = useData("/api/run", [beat]);
  const last = useRef(null);
  if (run) last.current = run;
  const shown = last.current;
  useEffect(() => {
    if (!shown || !shown.live) return undefined;
    const timer = setTimeout(() => next(beat + 1), 3000);
    return () => clearTimeout(timer);
  }, [beat, shown && shown.live]);
  if (!shown) return html`<main><${Waiting} error=${error} /></main>`;
  const [, name, id, other] = path.split("/");
  const pages = { rollouts: () => html`<${Rollouts} run=${shown} query=${query} />`, rollout: () => html`<${Rollout} id=${id} query=${query} />`,
    group: () => html`<${Group} id=${id} />`, compare: () => html`<${Compare} run=${shown} query=${query} />`, pair: () => html`<${Pair} a=${id} b=${other} />`, task: () => html`<${Task} query=${query} />`, timeline: () => html`<${Timeline} run=${shown} step=${id || shown.steps[shown.steps.length - 1]} />`,
    curves: () => html`<${Curves} run=${shown} />`, probes: () => html`<${Probes} />`, labels: () => html`<${Labels} />` };
  const link = (to) => html`<a href="#/${to}" class=${name === to ? "here" : ""}>${to}</a>`;
  return html`<header><b>${shown.name}</b><span class="dim">${shown.kind}, ${shown.total.toLocaleString("en")} rollouts${shown.running ? ", running" : ""}</span>
      <nav>${link("rollouts")}${link("compare")}${link("timeline")}${link("curves")}${link("probes")}${link("labels")}</nav></header>
    <main>${(pages[name] || (() => html`<p class="error">There is no page ${path}.</p>`))()}</main>`;
}

render(html`<${App} />`, document.getElementById("app"));
