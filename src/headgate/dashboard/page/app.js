// The page. It keeps what the server streams, and draws the view that is open. Every text goes in as text, never as HTML.

import { Plot, Spark, bytes, plots, seconds, short } from "/plots.js";

const POINTS = 300, EVENTS = 300, PAGE = 50, LISTED = 50;
const LATE = 2.5; // seconds after a look was due: then the program gives no answer
const QUIET = 15; // seconds after which the server itself is gone: it says each 10 that it is there
const $ = (id) => document.getElementById(id);
const programs = new Map(); // id -> { look, received, heard, history: Map(number -> points), events, ended }
const state = { program: "", heard: 0, tab: "overview", pools: {}, paused: false, link: "connecting", retry: 0, token: "", tasks: false, budgets: [], looking: null };
const applied = { updates: 0, worst: 0, last: 0 }; // milliseconds of script; read by the tests of the page

// -- elements ----------------------------------------------------------------------------------------------------------

function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (typeof child === "string" ? plain(child) : child)));
  return made;
}

// Names come from anywhere: what cannot be seen, and what would turn the text around it, is shown as terminals show it.
const UNSEEN = /[^\P{C}\t\n\r]|[\u2028\u2029]/gu;
const ORDINARY = /^[ -~]*$/; // most names are, and this is quick
const plain = (text) => (ORDINARY.test(text) ? text : text.replace(UNSEEN, "?"));

function say(element, text) {
  const shown = plain(text);
  if (element.textContent !== shown) element.textContent = shown;
}

function explain(element, text) {
  const shown = plain(text);
  if (element.title !== shown) element.title = shown;
}

function mood(element, value) {
  if ((element.dataset.mood ?? "") !== value) element.dataset.mood = value;
}

const whole = (value) => Number(value ?? 0).toLocaleString("en-US");
const many = (count, what) => `${whole(count)} ${what}${count === 1 ? "" : "s"}`;
const tenantName = (name) => (name === null ? "(none)" : name);
const countdown = (left) => (left < 0.1 ? "less than 0.1 s" : left < 1 ? `${left.toFixed(1)} s` : seconds(left));
const clock = (at) => new Date(at * 1000).toTimeString().slice(0, 8);

// -- a table whose rows stay where they are ----------------------------------------------------------------------------

class Table {
  // columns: { label, sort, num, className, less, least, optional, make(td), fill(td, row) } - `fill` writes into
  // what `make` made. Of `less` nothing is shown on narrow pages, of `least` nothing on those of a phone. A column that is optional is hidden until a row has something in it; then it stays.
  constructor(columns, { key, empty, sort = null, onsort = null, open = null }) {
    Object.assign(this, { columns, key, open, sort, none: empty });
    this.rows = new Map();
    this.heads = columns.map((column) => {
      const label = column.sort && onsort ? h("button", { type: "button", onclick: () => onsort(column.sort) }, column.label) : column.label;
      return h("th", { scope: "col", class: classes(column), hidden: column.optional ?? false }, label);
    });
    this.body = h("tbody");
    this.table = h("table", {}, h("thead", {}, h("tr", {}, ...this.heads)), this.body);
    this.empty = h("p", { class: "empty" }, empty);
    this.element = h("div", {}, h("div", { class: "scroll" }, this.table), this.empty);
  }

  update(rows, sort = null, none = this.none) {
    this.columns.forEach((column, index) => {
      if (column.sort && column.sort === sort) this.heads[index].setAttribute("aria-sort", "descending");
      else this.heads[index].removeAttribute("aria-sort");
    });
    const seen = new Set(rows.map(this.key));
    const spare = []; // rows whose content is gone: making others of them is cheaper than making new ones
    for (const [key, known] of this.rows) if (!seen.has(key)) { this.rows.delete(key); spare.push(known); }
    let before = null;
    for (const row of rows) {
      const key = this.key(row);
      let known = this.rows.get(key);
      if (!known) this.rows.set(key, (known = spare.shift() ?? this.makeRow()));
      known.row = row;
      this.columns.forEach((column, index) => column.fill(known.cells[index], row));
      const wanted = before ? before.nextSibling : this.body.firstChild;
      if (known.tr !== wanted) this.body.insertBefore(known.tr, wanted);
      before = known.tr;
    }
    this.showFilled();
    for (const known of spare) { if (known.tr === document.activeElement) this.body.querySelector("tr")?.focus(); known.tr.remove(); }
    this.table.hidden = !rows.length;
    say(this.empty, none);
    this.empty.hidden = rows.length > 0;
  }

  showFilled() {
    this.columns.forEach((column, index) => {
      if (!this.heads[index].hidden || ![...this.rows.values()].some((known) => known.cells[index].textContent)) return;
      this.heads[index].hidden = false;
      for (const known of this.rows.values()) known.cells[index].hidden = false;
    });
  }

  makeRow() {
    const cells = this.columns.map((column, index) => {
      const td = h("td", { class: classes(column), hidden: this.heads[index].hidden });
      if (column.make) column.make(td);
      return td;
    });
    const tr = h("tr", { tabindex: "-1", class: this.open ? "open" : "" }, ...cells);
    const known = { tr, cells, row: null };
    if (this.open) {
      tr.addEventListener("click", (event) => { if (!event.target.closest("button")) this.open(known.row); });
      tr.addEventListener("keydown", (event) => { if (event.key !== "Enter" || event.target !== tr) return;
        event.preventDefault(); // else the same key would press the button of the dialog that opens
        this.open(known.row);
      });
    }
    return known;
  }
}

const classes = (column) => [column.num ? "num" : "", column.className ?? "", column.less ? "less" : "", column.least ? "least" : ""].join(" ").trim();

const text = (label, get, more = {}) => ({ label, fill: (td, row) => { const value = get(row); say(td, value); explain(td, value.length > 10 ? value : ""); }, ...more });

const pill = (label, get, more = {}) => ({
  label,
  make: (td) => td.append(h("span", { class: "pill" })),
  fill: (td, row) => { const [said, feel] = get(row); say(td.firstChild, said); mood(td.firstChild, feel); explain(td, said); },
  ...more,
});

const meter = (label, get, more = {}) => ({
  label,
  make: (td) => td.append(h("span", { class: "meter" }, h("i")), h("span")),
  fill: (td, row) => {
    const [share, said, feel] = get(row);
    td.firstChild.hidden = share === null;
    if (share !== null) td.firstChild.firstChild.style.transform = `scaleX(${Math.max(0, Math.min(1, share)).toFixed(3)})`;
    mood(td.firstChild, feel ?? "");
    say(td.lastChild, said);
  },
  ...more,
});

const buttons = (get) => ({
  label: "",
  className: "row-actions",
  make: (td) => { td.shown = ""; },
  fill: (td, row) => {
    const actions = get(row);
    const names = actions.map((one) => one[0]).join();
    if (td.shown !== names) {
      td.shown = names;
      td.replaceChildren(...actions.map(([name], index) => h("button", { type: "button", class: "quiet", "data-act": true, onclick: () => td.actions[index][1]() }, name)));
    }
    td.actions = actions;
  },
});

function card(title, ...parts) {
  const count = h("span", { class: "count" });
  const header = h("header", {}, h("h2", {}, title), count, h("span", { class: "spring" }));
  return { element: h("section", { class: "card" }, header, ...parts), header, count };
}

// -- lists that may be long: the server pages them ---------------------------------------------------------------------

class LongList {
  // list: "tenants", "resources" or "workers"; defaultSort: the order in which the server sends the first rows. The
  // field for the filter is in the header, unless another one is given.
  constructor(title, list, columns, options) {
    Object.assign(this, { list, options, sort: options.defaultSort, filter: "", page: 0, asked: 0, view: null, of: "" });
    this.table = new Table(columns, { ...options, onsort: (by) => { this.sort = by; this.page = 0; this.refresh(true); } });
    this.input = options.input ?? filterField(list);
    this.input.addEventListener("input", () => { this.filter = this.input.value; this.page = 0; this.refresh(true); });
    this.back = h("button", { type: "button", class: "quiet", onclick: () => { this.page--; this.refresh(true); } }, "Previous");
    this.next = h("button", { type: "button", class: "quiet", onclick: () => { this.page++; this.refresh(true); } }, "Next");
    this.where = h("span");
    this.pager = h("div", { class: "pager" }, this.back, this.next, this.where);
    this.card = card(title, this.table.element, this.pager);
    if (!options.input) this.card.header.append(this.input);
    this.element = this.card.element;
  }

  update(view, total) {
    const of = `${state.program}/${view.number}`;
    if (this.of !== of) Object.assign(this, { of, page: 0 });
    this.view = view;
    this.total = total;
    this.refresh(false);
  }

  refresh(now) {
    const rows = this.view?.[this.list] ?? [];
    const isWhole = rows.length >= this.total;
    if (isWhole) {
      const wanted = this.filter.toLowerCase();
      const found = rows.filter((row) => this.options.name(row).toLowerCase().includes(wanted));
      this.show(this.sort === this.options.defaultSort ? found : sorted(found, this.sort), found.length);
    } else if (!this.filter && !this.page && this.sort === this.options.defaultSort) {
      this.show(rows, this.total);
    } else if (now || (performance.now() - this.asked > 2000 && !current()?.ended)) {
      this.ask();
    }
  }

  async ask() {
    this.asked = performance.now();
    const question = { program: state.program, pool: `#${this.view.number}`, list: this.list, filter: this.filter, sort: this.sort ?? "", offset: this.page * PAGE, limit: PAGE };
    const number = (this.question = (this.question ?? 0) + 1);
    try {
      const answer = await api(`/api/rows?${new URLSearchParams(question)}`);
      if (number === this.question) this.show(answer.rows, answer.total, true);
    } catch (error) { toast(error.message, "bad"); }
  }

  show(rows, total, isPage = false) {
    const from = this.page * PAGE;
    this.table.update(isPage ? rows : rows.slice(from, from + PAGE), this.sort, this.filter ? unmatched(`No ${this.list.slice(0, -1)}`, this.filter) : undefined);
    say(this.card.count, this.filter ? `${whole(total)} of ${whole(this.total)}` : whole(this.total));
    this.pager.hidden = total <= PAGE;
    this.back.disabled = this.page === 0;
    this.next.disabled = from + PAGE >= total;
    say(this.where, total ? `${whole(from + 1)} to ${whole(Math.min(from + PAGE, total))} of ${whole(total)}` : "");
  }
}

function filterField(what) {
  return h("input", { type: "search", placeholder: `Filter ${what}`, "aria-label": `Filter ${what}`, "data-filter": true, maxlength: "100" });
}

const unmatched = (what, filter) => `${what} matches \u201c${filter}\u201d.`;

function sorted(rows, by) {
  return [...rows].sort((a, b) => {
    const [x, y] = [a[by], b[by]];
    return typeof x === "number" && typeof y === "number" ? y - x : String(x ?? "").localeCompare(String(y ?? ""));
  });
}

// -- what is shown -----------------------------------------------------------------------------------------------------

const current = () => programs.get(state.program);
const views = (kind) => (current()?.look.pools ?? []).filter((view) => view.kind === kind);
const COUNTERS = { tasks: "active", resources: "healthy", workers: "ready" };
const usable = (view) => COUNTERS[view.kind] in view; // else it is being loaded, or held from the first look on, or broken
const since = () => (state.paused ? 0 : ((current()?.ended || performance.now()) - (current()?.received ?? 0)) / 1000);
const points = (view) => current()?.history.get(String(view.number)) ?? [];

function summed(list, names) {
  // Points of several pools, joined by their times: those of one look are the same. `lag` is the largest, others are sums.
  const joined = new Map();
  for (const view of list) {
    for (const point of points(view)) {
      let made = joined.get(point.t);
      if (!made) joined.set(point.t, (made = { t: point.t, ...Object.fromEntries(names.map((name) => [name, 0])) }));
      for (const name of names) made[name] = name === "lag" ? Math.max(made.lag, point.lag ?? 0) : made[name] + (point[name] ?? 0);
    }
  }
  return [...joined.values()].sort((a, b) => a.t - b.t);
}

function stat(label, withSpark = false) {
  const value = h("span"), more = h("small"), spark = withSpark ? new Spark() : null;
  const element = h("div", { class: "stat" }, h("dt", {}, label), h("dd", {}, value, more), spark?.element);
  return { element, update(shown, extra = "", feel = "", times = null, values = null) { say(value, shown); say(more, extra); mood(element, feel); if (spark && values) spark.update(times, values); } };
}

function overview() {
  const rate = stat("Tasks a second", true), running = stat("Running", true), queued = stat("Queued", true);
  const oldest = stat("Oldest in the queue", true), failing = stat("Failures a second", true), dropping = stat("Dropped a second", true);
  const resources = stat("Resources healthy"), workers = stat("Workers ready");
  const stats = h("dl", { class: "stats" }, ...[rate, running, queued, oldest, failing, dropping, resources, workers].map((one) => one.element));
  const flow = new Plot("", "Tasks a second over time"), depth = new Plot("", "Queue and running tasks over time");
  const notes = h("ul", { class: "notes" });
  const attention = card("Attention", notes);
  const pools = new Table([
    text("Pool", (view) => view.name, { className: "name cut" }),
    text("Kind", (view) => view.kind, { less: true }),
    pill("State", poolState),
    text("Running", (view) => (view.broken ? "" : view.kind === "tasks" ? `${view.active} of ${view.max_concurrent}` : whole(view.in_flight)), { num: true }),
    text("Queued", (view) => (view.broken || view.kind === "workers" ? "" : whole(view.kind === "tasks" ? view.queued : view.waiting)), { num: true }),
    text("Done", (view) => (view.broken || view.kind === "workers" ? "" : whole(view.completed ?? view.successes)), { num: true, least: true }),
    text("Failed", (view) => (view.kind === "tasks" && !view.broken ? whole(view.failed) : ""), { num: true, less: true }),
  ], { key: (view) => view.number, empty: "This program has no pools now.", open: (view) => { state.pools[view.kind] = view.number; go(view.kind); } });
  const all = card("Pools", pools.element), shared = new Budgets();
  const element = h("div", {}, stats, shared.element, h("div", { class: "two" }, card("Throughput", flow.element).element, card("Queue", depth.element).element), h("div", { class: "two" }, attention.element, all.element));
  return {
    element,
    update() {
      const [tasks, keys, machines] = Object.keys(COUNTERS).map((kind) => views(kind).filter(usable));
      const past = summed(tasks, ["done", "failed", "dropped", "queued", "active", "lag"]);
      const last = past[past.length - 1] ?? { done: 0, failed: 0, dropped: 0 };
      const times = past.map((point) => point.t);
      const sum = (list, name) => list.reduce((total, view) => total + (view[name] ?? 0), 0);
      const lag = Math.max(0, ...tasks.map((view) => view.lag));
      rate.update(short(last.done), "", "", times, past.map((point) => point.done));
      running.update(whole(sum(tasks, "active")), `of ${whole(sum(tasks, "max_concurrent"))}`, "", times, past.map((point) => point.active));
      queued.update(whole(sum(tasks, "queued")), "", "", times, past.map((point) => point.queued));
      oldest.update(seconds(lag), "", lag > 60 ? "warn" : "", times, past.map((point) => point.lag));
      failing.update(short(last.failed), `${whole(sum(tasks, "failed"))} in all`, last.failed > 0 ? "bad" : "", times, past.map((point) => point.failed));
      const gone = tasks.reduce((total, view) => total + dropped(view), 0);
      dropping.update(short(last.dropped), `${whole(gone)} in all`, last.dropped > 0 ? "warn" : "", times, past.map((point) => point.dropped));
      dropping.element.hidden = !gone;
      const healthy = sum(keys, "healthy"), known = sum(keys, "resource_count");
      resources.update(whole(healthy), `of ${whole(known)}`, known && !healthy ? "bad" : healthy < known ? "warn" : "");
      const ready = sum(machines, "ready"), there = sum(machines, "expected");
      workers.update(whole(ready), `of ${whole(there)}`, there && !ready ? "bad" : ready < there ? "warn" : "");
      resources.element.hidden = !keys.length;
      workers.element.hidden = !machines.length;
      flow.update(times, endings(past));
      depth.update(times, [{ name: "queued", values: past.map((p) => p.queued), colour: "c2" }, { name: "running", values: past.map((p) => p.active), colour: "c3" }]);
      shared.update(state.budgets);
      pools.update(current()?.look.pools.filter((view) => usable(view) || view.broken) ?? []);
      say(all.count, whole(current()?.look.pools.length));
      note(notes, attentionOf(tasks, keys, machines));
    },
  };
}

const DROPPED = ["rejected", "expired", "stale"]; // taken out of the queue: no failure of what they run
const dropped = (view) => DROPPED.reduce((total, name) => total + (view[name] ?? 0), 0);
const endings = (past) => [{ name: "done/s", values: past.map((p) => p.done) }, { name: "failed/s", values: past.map((p) => p.failed), colour: "cbad" },
  ...(past.some((p) => p.dropped) ? [{ name: "dropped/s", values: past.map((p) => p.dropped), colour: "c2" }] : [])];
const budgetOf = (view) => state.budgets.find((one) => one.id === view.id && one.members.some((member) => member.id === view.shared?.member));

class Budgets {
  // Budgets that processes share: for each the sum, then its processes. Those of this page can be opened.
  constructor() {
    this.table = new Table([
      { label: "Shared budget", className: "name budget", fill: (td, row) => { const name = row.isSum ? row.name : memberName(row); say(td, name); explain(td, name); td.classList.toggle("part", !row.isSum); } },
      text("Running", (row) => (row.isSum ? `${whole(row.active)} of ${whole(row.limit)}` : whole(row.active)), { num: true }),
      text("Queued", (row) => whole(row.queued), { num: true }),
      text("Processes", (row) => (row.isSum ? whole(row.member_count) : ""), { num: true, least: true }),
    ], { key: (row) => `${row.budget}/${row.isSum ? "" : row.id}`, empty: "", open: (row) => this.show(row) });
    this.card = card("Shared with other processes", this.table.element);
    this.element = this.card.element;
  }

  show(row) {
    if (!row.program) return;
    const view = programs.get(row.program)?.look?.pools.find((one) => one.shared?.member === row.id);
    if (view) state.pools.tasks = view.number;
    choose(row.program);
    go("tasks");
  }

  update(budgets) {
    this.element.hidden = !budgets.length;
    this.table.update(budgets.flatMap((one, index) => [{ ...one, budget: index, isSum: true }, ...one.members.map((member) => ({ ...member, budget: index }))]));
  }
}

const memberName = (row) => (row.program ? `${row.title} (pid ${row.pid})` : `pid ${row.pid}${row.host ? ` on ${row.host}` : ""}`);

function poolState(view) {
  if (view.broken) return ["cannot be shown", "bad"];
  if (view.held) return [`loop held ${seconds(view.held)}`, "bad"];
  if (view.kind === "resources") return view.healthy ? (view.healthy < view.resource_count ? [`${view.healthy} of ${view.resource_count} healthy`, "warn"] : ["healthy", "good"]) : ["none healthy", "bad"];
  if (view.kind === "workers") return view.ready >= view.expected ? ["ready", "good"] : [`${view.ready} of ${view.expected} ready`, "warn"];
  if (view.paused) return ["paused", "warn"];
  if (view.waiting_for) return [`waits for ${view.waiting_for.cause}`, "warn"];
  return [view.state, view.state === "open" ? "good" : "warn"];
}

function attentionOf(tasks, keys, machines) {
  const found = [];
  for (const view of (current()?.look.pools ?? []).filter((view) => view.broken)) {
    found.push(["bad", `${view.name} cannot be shown`, `Looking at it fails with ${view.broken}. The log of the program says more.`, view.kind, view]);
  }
  for (const view of tasks) {
    if (view.held) found.push(["bad", `The event loop of ${view.name} is held`, `for ${seconds(view.held)}: some task computes without an await`, "tasks", view]);
    else if (view.waiting_for) found.push(["warn", `${view.name} waits for ${view.waiting_for.cause}`, view.waiting_for.seconds ? `about ${countdown(view.waiting_for.seconds)} more` : "", "tasks", view]);
    if (view.blocked_submitters) found.push(["warn", `${many(view.blocked_submitters, "submitter")} of ${view.name} ${view.blocked_submitters === 1 ? "waits" : "wait"}`, "its queue is full", "tasks", view]);
    const first = (view.tenants ?? [])[0];
    if (first && first.lag > 5) found.push(["warn", `${tenantName(first.tenant)} waits longest in ${view.name}`, `its oldest task is queued for ${seconds(first.lag)}`, "tasks", view]);
    const failed = view.failures?.[0];
    if (failed && current().look.at - failed.ended_at < 60) found.push(["bad", `${view.name}#${failed.number} ${failed.status}`, failed.why, "tasks", view]);
  }
  for (const view of keys) {
    if (view.disabled) found.push(["bad", `${view.disabled} of ${many(view.resource_count, "resource")} of ${view.name} ${view.disabled === 1 ? "is" : "are"} disabled`, "", "resources", view]);
    if (view.cooling_down) {
      const soonest = Math.min(...view.resources.filter((row) => row.cooldown).map((row) => row.cooldown));
      found.push([view.healthy ? "warn" : "bad", `${view.cooling_down} of ${many(view.resource_count, "resource")} of ${view.name} ${view.cooling_down === 1 ? "cools" : "cool"} down`, Number.isFinite(soonest) ? `the first is back in ${countdown(soonest)}` : "", "resources", view]);
    }
  }
  for (const view of machines) {
    const gone = view.blocked + view.lost;
    if (gone) found.push(["bad", `${many(gone, "worker")} of ${view.name} ${gone === 1 ? "is" : "are"} blocked or lost`, "", "workers", view]);
    if (view.losses) found.push(["warn", `${many(view.losses, "worker")} of ${view.name} ${view.losses === 1 ? "was" : "were"} lost`, "since the pool was entered", "workers", view]);
  }
  return found;
}

function note(list, found) {
  const shown = JSON.stringify(found.map(([feel, title, more]) => [feel, title, more]));
  if (list.shown === shown) return;
  list.shown = shown;
  const lines = found.slice(0, 12).map(([feel, title, more, tab, view]) =>
    h("li", { "data-mood": feel }, h("div", {}, h("button", { type: "button", onclick: () => { state.pools[tab] = view.number; go(tab); } }, title), " ", h("span", {}, more))));
  list.replaceChildren(...(lines.length ? lines : [h("li", { "data-mood": "good" }, h("span", {}, "Nothing needs attention."))]));
}

function chooser(kind, label) {
  const select = h("select", { "aria-label": label, onchange: () => { state.pools[kind] = Number(select.value); draw(); } });
  return {
    select,
    chosen() {
      const known = views(kind).filter(usable);
      const names = JSON.stringify(known.map((view) => [view.number, view.name]));
      if (select.shown !== names) {
        select.shown = names;
        select.replaceChildren(...known.map((view) => h("option", { value: view.number }, view.name)));
      }
      const found = known.find((view) => view.number === state.pools[kind]) ?? known[0];
      if (found) select.value = String(found.number);
      select.hidden = known.length < 2;
      return found;
    },
  };
}

function titled(head, title, pick, pool) {
  say(title, pool.name);
  explain(title, pool.name);
  title.hidden = !pick.select.hidden;
  const [said, feel] = poolState(pool), badge = head.querySelector(".pill");
  say(badge, said);
  mood(badge, feel);
}

// A button that cannot be used now says why. `tellLink` disables it.
function refuse(button, why) {
  explain(button, why);
  button.dataset.why = why;
  button.disabled = Boolean(why || current()?.ended);
}

function nothing(title, words) {
  return h("div", { class: "blank" }, h("h1", {}, title), h("p", {}, words));
}

function tasksView() {
  const pick = chooser("tasks", "Task pool");
  const done = stat("Done a second"), running = stat("Running"), queued = stat("Queued"), oldest = stat("Oldest in the queue"), fair = stat("Fairness"), failed = stat("Failed"), lost = stat("Dropped");
  const flow = new Plot("", "Tasks a second", true), depth = new Plot("", "Queued tasks of each tenant", true), wait = new Plot("s", "Age of the oldest task of each tenant", true);
  const places = new Places(), shared = new Budgets();
  const title = h("h2");
  const acts = [["Pause", () => pauseOrResume(pool)], ["Resize", () => resize(pool)], ["Drain", () => drain(pool)]].map(([name, does]) => h("button", { type: "button", class: "quiet", "data-act": true, onclick: does }, name));
  const input = filterField("tenants and tasks");
  const head = h("div", { class: "title" }, title, pick.select, h("span", { class: "pill" }), h("span", { class: "spring" }), input, ...acts);
  let pool = null;
  const tenants = new LongList("Tenants", "tenants", [
    text("Tenant", (row) => tenantName(row.tenant), { className: "name cut", sort: "tenant" }),
    text("Running", (row) => whole(row.active), { num: true, sort: "active" }),
    text("Queued", (row) => whole(row.queued), { num: true, sort: "queued" }),
    { label: "Oldest", num: true, sort: "lag", fill: (td, row) => { say(td, row.queued ? seconds(row.lag) : ""); td.classList.toggle("warn", row.lag > 10); } },
    text("Wait p50", (row) => seconds(row.p50), { num: true, sort: "p50", less: true }),
    text("p99", (row) => seconds(row.p99), { num: true, sort: "p99", least: true }),
    buttons((row) => (row.tenant === null ? [] : [[row.paused ? "Resume" : "Pause", () => pauseOrResume(pool, row.tenant, row.paused)]])),
  ], { key: (row) => tenantName(row.tenant), name: (row) => tenantName(row.tenant), empty: "No tenant has tasks now.", defaultSort: "lag", input });
  const act = (row) => [["Cancel", () => cancel(pool, row)]];
  const taskColumns = (when) => [
    text("Task", (row) => `#${row.number}`, { className: "name" }),
    text("Tenant", (row) => tenantName(row.tenant), { className: "cut" }),
    text("Function", (row) => row.what, { className: "mono cut", less: true }),
    { label: when, num: true, fill: (td, row) => { say(td, seconds(row.seconds + since())); } },
    text("Try", (row) => String(row.attempt || ""), { num: true, less: true }),
    text("Resource", (row) => row.resource ?? "", { less: true }),
    text("Worker", (row) => row.worker ?? "", { className: "mono", less: true }),
    buttons(act),
  ];
  const slow = new Table(taskColumns("Running for"), { key: (row) => row.id, empty: "No task runs now.", open: (row) => tell(row.id) });
  const old = new Table(taskColumns("Queued for").filter((column) => !["Resource", "Worker", "Try"].includes(column.label)), { key: (row) => row.id, empty: "Nothing is queued.", open: (row) => tell(row.id) });
  const bad = new Table([
    text("Task", (row) => `#${row.number}`, { className: "name" }),
    text("Tenant", (row) => tenantName(row.tenant), { className: "cut" }),
    pill("Ended", (row) => [row.status, row.status === "failed" ? "bad" : "warn"], { least: true }),
    text("When", (row) => (row.ended_at ? clock(row.ended_at) : ""), { num: true, less: true }),
    text("Why", (row) => (row.retried_as ? `${row.why}; ran again as #${row.retried_as}` : row.why), { className: "wide" }),
    buttons((row) => (row.can_retry ? [["Retry", () => retry(pool, row)]] : [])),
  ], { key: (row) => row.id, empty: "No task has ended badly.", open: (row) => tell(row.id) });
  const slowCard = card("Running longest", slow.element), oldCard = card("Waiting longest, of each tenant", old.element), older = h("p", { class: "more" });
  const words = (row) => [`#${row.number}`, tenantName(row.tenant), row.what ?? "", row.why ?? "", row.resource ?? "", row.worker ?? "", row.retried_as ? `#${row.retried_as}` : ""].join("\n").toLowerCase();
  const fill = (table, its, rows, all) => {
    const wanted = input.value.toLowerCase(), found = wanted ? rows.filter((row) => words(row).includes(wanted)) : rows;
    table.update(found, null, wanted && rows.length ? unmatched(rows.length < all ? `None of the ${rows.length} listed` : "No task", input.value) : undefined);
    say(its.count, found.length < all ? `${whole(found.length)} of ${whole(all)}` : whole(all));
  };
  input.addEventListener("input", () => draw());
  const badCard = card("Ended badly", bad.element, older);
  const body = h("div", {}, head, h("dl", { class: "stats" }, ...[done, running, queued, oldest, fair, failed, lost].map((one) => one.element)), shared.element,
    h("div", { class: "three" }, card("Throughput", flow.element).element, card("Queue by tenant", depth.element).element, card("Oldest task by tenant", wait.element).element),
    h("div", { class: "two" }, tenants.element, oldCard.element), slowCard.element, badCard.element);
  const none = nothing("No task pool", "This program has no TaskPool that can be shown now. It appears here as soon as it makes one.");
  return {
    element: h("div", {}, body, none),
    update() {
      pool = pick.chosen();
      body.hidden = !pool;
      none.hidden = Boolean(pool);
      if (!pool) return;
      titled(head, title, pick, pool);
      const past = points(pool), last = past[past.length - 1] ?? {};
      say(acts[0], pool.paused ? "Resume" : "Pause");
      done.update(short(last.done ?? 0), `${whole(pool.completed)} in all`);
      running.update(whole(pool.active), `${pool.shared ? "here, limit" : "of"} ${whole(pool.max_concurrent)}${pool.waiting ? `, ${whole(pool.waiting)} wait` : ""}`);
      queued.update(whole(pool.queued), pool.max_queued ? `of ${whole(pool.max_queued)}` : "");
      oldest.update(seconds(pool.lag), "", pool.lag > 60 ? "warn" : "");
      fair.update(pool.jain.toFixed(2), pool.jain > 0.9 ? "fair" : "unfair", pool.jain < 0.7 ? "warn" : "");
      failed.update(whole(pool.failed), "", last.failed > 0 ? "bad" : "");
      lost.update(whole(dropped(pool)), "", last.dropped > 0 ? "warn" : "");
      lost.element.hidden = !dropped(pool);
      const all = budgetOf(pool);
      shared.update(all ? [all] : []);
      const times = past.map((point) => point.t);
      flow.update(times, endings(past));
      const names = places.of(`${state.program}/${pool.number}`, past);
      const series = (which) => names.map((name) => name === null ? null : { name: plain(name), values: past.map((p) => p.tenants?.[name]?.[which] ?? null) });
      depth.update(times, series(0));
      wait.update(times, series(1));
      tenants.update(pool, Math.max(pool.tenant_count, pool.tenants.length));
      for (const button of acts) refuse(button, pool.state === "open" ? "" : `${pool.name} is ${pool.state}: it takes no more tasks`);
      const badly = pool.failed + dropped(pool), listed = pool.failures.length;
      fill(slow, slowCard, pool.running, pool.active + pool.waiting);
      fill(old, oldCard, pool.oldest, pool.queued);
      fill(bad, badCard, pool.failures, badly);
      older.hidden = listed >= badly;
      say(older, listed >= LISTED ? `The last ${LISTED} are listed.` : "The others are not remembered: they hold an idempotency key, are of a former run, or the pool was made with a small keep=.");
    },
  };
}

class Places {
  // The six tenants of the plots, which the program chooses. One keeps its place, and with it its colour, as long as it
  // is chosen.
  constructor() { Object.assign(this, { pool: "", names: [] }); }

  of(pool, past) {
    if (this.pool !== pool) Object.assign(this, { pool, names: Array(6).fill(null) });
    const chosen = Object.keys(past[past.length - 1]?.tenants ?? {});
    this.names = this.names.map((name) => (chosen.includes(name) ? name : null));
    const coming = chosen.filter((name) => !this.names.includes(name)).sort();
    this.names = this.names.map((name) => name ?? coming.shift() ?? null);
    return this.names;
  }
}

/** One window of a quota: "0 of 60 requests (full in 12 s)". What is not known is left out. */
function windowText(name, { left, limit, seconds_until_full: full }, passed) {
  const amount = left === null ? "any" : limit === null ? short(left) : `${short(left)} of ${short(limit)}`;
  return `${amount} ${name.replace("_", " ")}${full > passed ? ` (full in ${countdown(full - passed)})` : ""}`;
}

function resourcesView() {
  const pick = chooser("resources", "Resource pool");
  const healthy = stat("Healthy"), cooling = stat("Cool down"), disabled = stat("Disabled"), flight = stat("In flight"), ok = stat("Successes a second"), refused = stat("Refusals a second");
  const rates = new Plot("", "Successes and refusals a second"), use = new Plot("", "Uses at a time");
  const title = h("h2");
  const head = h("div", { class: "title" }, title, pick.select, h("span", { class: "pill" }));
  let pool = null;
  const list = new LongList("Resources", "resources", [
    text("Resource", (row) => row.id, { className: "name cut", sort: "id" }),
    pill("Status", (row) => (row.status === "disabled" ? ["disabled", "bad"] : row.paused ? ["paused", "warn"] : left(row) > 0 ? ["cools down", "warn"] : rest(row) > 0 ? ["quota spent", "warn"] : ["healthy", "good"]), { sort: "status" }),
    { ...meter("Back in", (row) => { const seconds = rest(row); return seconds > 0 ? [seconds / longestRest(row), `${seconds.toFixed(1)} s`, "warn"] : [null, ""]; }, { sort: "cooldown" }), className: "rest" },
    text("Quota left", (row) => Object.entries(row.quota?.windows ?? {}).map(([name, one]) => windowText(name, one, since())).join(", "), { less: true, optional: true }),
    meter("In flight", (row) => (row.max_in_flight ? [row.in_flight / row.max_in_flight, `${row.in_flight} of ${row.max_in_flight}`] : [null, whole(row.in_flight)]), { num: true, sort: "in_flight", least: true }),
    text("Adaptive", (row) => (row.adaptive ? `${row.adaptive.least} to ${row.adaptive.most}${row.adaptive.refused_at === null ? "" : `, refused at ${row.adaptive.refused_at} ${seconds(row.adaptive.seconds_since_cut + since())} ago`}` : ""), { less: true, optional: true }),
    text("Ok", (row) => whole(row.successes), { num: true, sort: "successes", least: true }),
    text("Refused", (row) => whole(row.refusals), { num: true, sort: "refusals", least: true }),
    text("Ok of ended", okOfEnded, { num: true, less: true }),
    buttons((row) => [...(row.status === "disabled" || left(row) > 0 ? [["Enable", () => enable(pool, row)]] : []), ...(row.status === "disabled" ? [] : [["Disable", () => disable(pool, row)]]), [row.paused ? "Resume" : "Pause", () => pauseOrResume(pool, row.id, row.paused)]]),
  ], { key: (row) => row.id, name: (row) => row.id, empty: "This pool has no resource.", defaultSort: null });
  const left = (row) => Math.max(0, row.cooldown - since());
  const restAtFirst = (row) => Math.max(row.cooldown, row.quota?.seconds_until_open ?? 0);
  const rest = (row) => Math.max(0, restAtFirst(row) - since());
  const rests = new Map();
  const longestRest = (row) => { const key = `${pool.number}/${row.id}`; const most = Math.max(rests.get(key) ?? 0, restAtFirst(row)); rests.set(key, restAtFirst(row) ? most : 0); return most || 1; };
  const body = h("div", {}, head, h("dl", { class: "stats" }, ...[healthy, cooling, disabled, flight, ok, refused].map((one) => one.element)),
    h("div", { class: "two" }, card("Calls", rates.element).element, card("In flight", use.element).element), list.element);
  const none = nothing("No resource pool", "This program has no ResourcePool that can be shown now.");
  return {
    element: h("div", {}, body, none),
    ticks: true,
    update() {
      pool = pick.chosen();
      body.hidden = !pool;
      none.hidden = Boolean(pool);
      if (!pool) return;
      titled(head, title, pick, pool);
      const past = points(pool), last = past[past.length - 1] ?? {};
      healthy.update(whole(pool.healthy), `of ${whole(pool.resource_count)}`, pool.healthy ? "" : "bad");
      cooling.update(whole(pool.cooling_down), "", pool.cooling_down ? "warn" : "");
      disabled.update(whole(pool.disabled), "", pool.disabled ? "bad" : "");
      flight.update(whole(pool.in_flight), pool.waiting ? `${whole(pool.waiting)} wait` : "");
      ok.update(short(last.ok ?? 0), `${whole(pool.successes)} in all`);
      refused.update(short(last.refused ?? 0), `${whole(pool.refusals)} in all`, last.refused > 0 ? "warn" : "");
      const times = past.map((point) => point.t);
      rates.update(times, [{ name: "ok/s", values: past.map((p) => p.ok), colour: "c3" }, { name: "refused/s", values: past.map((p) => p.refused), colour: "c2" }]);
      use.update(times, [{ name: "in flight", values: past.map((p) => p.in_flight) }, { name: "cooling", values: past.map((p) => p.cooling_down), colour: "c2" }]);
      list.update(pool, pool.resource_count);
    },
  };
}

// Uses that still run say nothing yet. (In flight are those of all pools that share the resource.)
function okOfEnded(row) {
  const ended = Math.max(row.successes + row.refusals, row.acquires - row.in_flight);
  if (!ended) return "";
  const share = Math.round((100 * row.successes) / ended);
  return `${row.successes < ended ? Math.min(share, 99) : share} %`;
}

const isFar = (row) => !row.address.startsWith("unix:"); // else it is on this machine, and its address is the path of a socket

function workersView() {
  const pick = chooser("workers", "Worker pool");
  const ready = stat("Ready"), flight = stat("Calls"), memory = stat("Memory"), blocked = stat("Blocked"), losses = stat("Lost");
  const load = new Plot("", "Calls on workers"), size = new Plot("B", "Memory of workers");
  const title = h("h2");
  let pool = null;
  const button = h("button", { type: "button", class: "quiet", "data-act": true, onclick: () => resize(pool) }, "Resize");
  const head = h("div", { class: "title" }, title, pick.select, h("span", { class: "pill" }), h("span", { class: "spring" }), button);
  const list = new LongList("Workers", "workers", [
    text("Worker", (row) => row.uid, { className: "name mono cut", sort: "uid" }),
    pill("State", (row) => [row.state, row.state === "ready" ? "good" : ["blocked", "lost"].includes(row.state) ? "bad" : "warn"], { sort: "state" }),
    meter("Calls", (row) => (row.most ? [row.in_flight / row.most, `${row.in_flight} of ${row.most}`] : [null, whole(row.in_flight)]), { num: true, sort: "in_flight" }),
    text("Memory", (row) => (row.memory === null ? "" : bytes(row.memory)), { num: true, sort: "memory" }),
    text("Pid", (row) => String(row.pid || ""), { num: true, less: true }),
    text("Host", (row) => (isFar(row) ? row.host : ""), { className: "cut", less: true, optional: true }),
    text("Address", (row) => (isFar(row) ? row.address : ""), { className: "mono cut", less: true, optional: true }),
    text("Tags", (row) => row.tags.join(", "), { less: true, optional: true }),
    text("Note", (row) => row.replaced_because, { less: true, optional: true }),
  ], { key: (row) => row.uid, name: (row) => `${row.uid} ${row.pid} ${row.host} ${row.address}`, empty: "This pool has no worker now.", defaultSort: null });
  const body = h("div", {}, head, h("dl", { class: "stats" }, ...[ready, flight, memory, blocked, losses].map((one) => one.element)),
    h("div", { class: "two" }, card("Calls", load.element).element, card("Memory", size.element).element), list.element);
  const none = nothing("No worker pool", "This program has no WorkerPool that can be shown now.");
  return {
    element: h("div", {}, body, none),
    update() {
      pool = pick.chosen();
      body.hidden = !pool;
      none.hidden = Boolean(pool);
      if (!pool) return;
      titled(head, title, pick, pool);
      refuse(button, pool.size ? "" : "This pool starts no workers: it discovers those that others started.");
      ready.update(whole(pool.ready), `of ${whole(pool.expected)}`, pool.ready < pool.expected ? "warn" : "");
      flight.update(whole(pool.in_flight));
      memory.update(bytes(pool.memory));
      blocked.update(whole(pool.blocked), "", pool.blocked ? "bad" : "");
      losses.update(whole(pool.losses), "while watched", pool.losses ? "warn" : "");
      const past = points(pool), times = past.map((point) => point.t);
      load.update(times, [{ name: "calls", values: past.map((p) => p.in_flight) }]);
      size.update(times, [{ name: "memory", values: past.map((p) => p.memory), colour: "c4" }]);
      list.update(pool, pool.worker_count);
    },
  };
}

const MOODS = { resource_cooled: "warn", resource_disabled: "bad", worker_lost: "bad", worker_blocked: "bad", worker_not_started: "bad", pool_store_trouble: "bad", pool_lease_lost: "bad", pool_unseen_failures: "bad", pool_drop: "warn", pool_requeue: "warn", pool_paused: "warn", resource_paused: "warn", pool_resumed: "good", resource_resumed: "good", resource_recovered: "good", resource_enabled: "good", worker_ready: "good" };
const PLAIN = new Set(["name", "topic", "at", "seq"]);

const KINDS = { all: () => true, actions: (topic) => topic === "observe.actions", tasks: (topic) => /^(tasks|lifecycle)\./.test(topic), resources: (topic) => topic.startsWith("resources."), workers: (topic) => topic.startsWith("workers.") };

function eventsView() {
  const list = h("ol", { class: "feed" });
  const kind = h("select", { "aria-label": "Kind of event", onchange: () => draw() }, ...Object.keys(KINDS).map((name) => h("option", { value: name }, name)));
  const input = h("input", { type: "search", placeholder: "Filter events", "aria-label": "Filter events", "data-filter": true, oninput: () => draw() });
  const tasks = h("input", { type: "checkbox", id: "with-tasks", onchange: () => { state.tasks = tasks.checked; connect(); } });
  const waiting = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => { scrollTo(0, 0); newest = Infinity; draw(); } });
  const all = card("Events", list);
  all.header.append(waiting, h("label", { for: "with-tasks", title: "What happens to each task too, up to 200 events a second" }, tasks, " single tasks"), kind, input);
  const empty = h("p", { class: "empty" }, "Nothing has happened yet. Cooldowns, lost workers and actions appear here as they happen.");
  all.element.append(empty);
  const rows = new Map();
  let isPointed = false, newest = Infinity, of = ""; // who reads a row wants it to stay: newer ones than `newest` wait
  list.addEventListener("pointerenter", (event) => { isPointed = event.pointerType === "mouse"; });
  list.addEventListener("pointerleave", () => { isPointed = false; });
  return {
    element: all.element,
    update() {
      const events = current()?.events ?? [], last = events[events.length - 1]?.seq ?? 0;
      if (of !== state.program) [of, newest] = [state.program, Infinity];
      const isRead = rows.size > 0 && (isPointed || scrollY > 8);
      if (!isRead || newest > last) newest = last;
      const wanted = input.value.toLowerCase(), fits = KINDS[kind.value];
      const fitting = events.filter((event) => fits(event.topic ?? "") && (!wanted || JSON.stringify(event).toLowerCase().includes(wanted)));
      const found = fitting.filter((event) => event.seq <= newest).slice(-200);
      const keys = new Set(found.map((event) => `${state.program}/${event.seq}`));
      for (const [key, row] of rows) if (!keys.has(key)) { row.remove(); rows.delete(key); }
      let after = null;
      for (const event of [...found].reverse()) {
        const key = `${state.program}/${event.seq}`;
        if (!rows.has(key)) rows.set(key, eventRow(event));
        const wantedAt = after ? after.nextSibling : list.firstChild;
        if (rows.get(key) !== wantedAt) list.insertBefore(rows.get(key), wantedAt);
        after = rows.get(key);
      }
      const late = fitting.filter((event) => event.seq > newest).length;
      say(all.count, whole(found.length));
      say(waiting, `${whole(late)} new`);
      waiting.hidden = !late;
      say(empty, events.length ? (wanted ? unmatched("No event", input.value) : "No event is of this kind.") : "Nothing has happened yet. Cooldowns, lost workers and actions appear here as they happen.");
      empty.hidden = found.length > 0;
    },
  };
}

const number = (id) => (id ? `task #${String(id).split("/").pop()}` : "");
const workerName = (e) => (e.pid ? `${e.uid} (pid ${e.pid})` : e.uid);
const SENTENCES = {
  resource_cooled: (e) => `${e.resource_id} cools down for ${seconds(e.seconds)}${e.consecutive > 1 ? `, ${e.consecutive} in a row` : ""}: ${e.reason ?? "no reason given"}`,
  resource_disabled: (e) => `${e.resource_id} is disabled: ${e.reason ?? "by hand"}`,
  resource_limit_changed: (e) => `${e.resource_id} takes ${e.limit} at a time, ${e.refused_at === null ? `up from ${e.old_limit}` : `refused at ${e.refused_at}: ${e.reason ?? "no reason given"}`}`,
  resource_recovered: (e) => `${e.resource_id} is back`,
  resource_enabled: (e) => `${e.resource_id} is enabled`,
  resource_paused: (e) => `${e.resource_id} is paused`,
  resource_resumed: (e) => `${e.resource_id} is resumed`,
  pool_paused: (e) => `${e.tenant === null ? e.pool : tenantName(String(e.tenant))} is paused`,
  pool_resumed: (e) => `${e.tenant === null ? e.pool : tenantName(String(e.tenant))} is resumed${e.before ? `, because ${e.before} waits` : ""}`,
  resource_added: (e) => `${e.resource_id} was added`,
  resource_removed: (e) => `${e.resource_id} was removed`,
  worker_lost: (e) => `${workerName(e)} is lost: ${e.reason}${e.restarted ? "; another takes its place" : ""}`,
  worker_ready: (e) => `${workerName(e)} takes calls`,
  worker_started: (e) => `${workerName(e)} is started`,
  worker_stopped: (e) => `${workerName(e)} has stopped`,
  action_taken: (e) => `${e.action} ${e.target}, from the ${e.origin}: ${e.outcome}`,
  pool_submit: (e) => `${number(e.task_id)} of ${tenantName(e.partition)}, ${e.queue_depth} queued`,
  pool_dequeue: (e) => `${number(e.task_id)} starts after ${seconds(e.queued_for)}`,
  pool_requeue: (e) => `${number(e.task_id)} is queued again: ${e.reason}`,
  pool_finish: (e) => `${number(e.task_id)} ${e.status}${e.ran_for ? ` after ${seconds(e.ran_for)}` : ""}${e.error ? `: ${e.error}` : ""}`,
  task_dispatched: (e) => `${e.tag} is given to ${e.uid}`,
  task_finished: (e) => `${e.tag} on ${e.uid} ${e.outcome}`,
};

function eventRow(event) {
  const rest = () => Object.entries(event).filter(([name, value]) => !PLAIN.has(name) && value !== null && value !== "").map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
  const words = SENTENCES[event.name]?.(event) ?? rest();
  const bad = event.name === "pool_finish" && event.status === "failed" ? "bad" : MOODS[event.name] ?? "";
  const pool = typeof event.pool === "string" && event.pool ? `${event.pool}: ` : "";
  return h("li", {}, h("time", {}, clock(event.at)), h("b", { "data-mood": bad }, event.name.replaceAll("_", " ")), h("span", {}, pool + words));
}

// -- actions -----------------------------------------------------------------------------------------------------------

let asking = null; // what is told the answer of the dialog that is open

function confirmed(title, words, yes, { danger = false, field = null } = {}) {
  asking?.(null);
  const dialog = $("confirm");
  say($("confirm-title"), title);
  say($("confirm-text"), words);
  say($("confirm-yes"), yes);
  $("confirm-yes").classList.toggle("danger", danger);
  $("confirm-field").hidden = field === null;
  $("confirm-input").disabled = field === null; // else it would be checked
  $("confirm-wrong").hidden = true;
  if (field) { say($("confirm-label"), field.label); $("confirm-input").value = field.value; }
  dialog.showModal();
  if (field) $("confirm-input").select();
  return new Promise((done) => {
    asking = (isYes) => { asking = null; dialog.close(); if (dialog.contains(document.activeElement)) document.activeElement.blur(); done(isYes ? (field ? $("confirm-input").value : true) : null); };
  });
}

async function act(action, target, pool) {
  if (current()?.ended) return toast(`${titleOf(current().look)} has ended.`, "bad");
  try {
    const answer = await api("/api/act", { method: "POST", body: JSON.stringify({ program: state.program, action, target, pool: pool ? `#${pool.number}` : "" }) });
    toast(answer.done);
  } catch (error) { toast(error.message, "bad"); }
}

async function cancel(pool, row) {
  if (await confirmed(`Cancel ${pool.name}#${row.number}?`, row.status === "queued" ? "It is queued, and is taken out of the queue at once." : "It runs. A coroutine is cancelled at its next await. A plain function cannot be interrupted: it runs to its end, and its result is dropped.", "Cancel the task", { danger: true })) await act("cancel", row.id, pool);
}
async function retry(pool, row) {
  if (await confirmed(`Run ${pool.name}#${row.number} again?`, "It is submitted as a new task, with the same function, arguments and options.", "Run it again")) await act("retry", row.id, pool);
}
async function enable(pool, row) {
  if (await confirmed(`Enable ${row.id}?`, "Its cooldown, or its being disabled, ends now.", "Enable")) await act("enable", row.id, pool);
}
async function disable(pool, row) {
  if (await confirmed(`Disable ${row.id}?`, "It gets no new calls until it is enabled. What uses it goes on.", "Disable", { danger: true })) await act("disable", row.id, pool);
}
async function pauseOrResume(pool, part = null, isPaused = pool.paused) {
  const what = part ?? pool.name, [target, of] = part === null ? [`#${pool.number}`, null] : [part, pool];
  if (isPaused) {
    if (await confirmed(`Resume ${what}?`, pool.kind === "tasks" ? "Queued tasks start again." : "Calls begin with it again.", "Resume")) await act("resume", target, of);
    return;
  }
  const words = pool.kind === "tasks" ? "Queued tasks wait until it is resumed, and can still expire. What runs continues." : "No call begins with it until it is resumed. What uses it continues.";
  if (await confirmed(`Pause ${what}?`, words, "Pause")) await act("pause", target, of);
}
async function resize(pool) {
  const tasks = pool.kind === "tasks";
  const size = await confirmed(`Resize ${pool.name}?`, "What runs goes on.", "Resize", { field: { label: tasks ? "Tasks at a time" : "Workers", value: tasks ? pool.max_concurrent : pool.size } });
  if (size) await act("resize", size, pool);
}
async function drain(pool) {
  if (await confirmed(`Drain ${pool.name}?`, "The pool is closed for good: from now on it takes no tasks, it finishes those that it has, and then it is gone. This cannot be undone. (pool.drain() in the program waits too, but leaves the pool open.)", "Drain and close", { danger: true })) await act("drain", `#${pool.number}`, null);
}

async function tell(task) {
  const dialog = $("story");
  say($("story-title"), "Story");
  say($("story-state"), "Loading");
  $("story-lines").replaceChildren();
  dialog.showModal();
  try {
    const { story } = await api(`/api/story?${new URLSearchParams({ program: state.program, task })}`);
    const [title, ...lines] = story.split("\n");
    const cut = title.indexOf(": ", title.lastIndexOf("/"));
    say($("story-title"), title.slice(0, title.indexOf(",") > 0 ? title.indexOf(",") : undefined));
    say($("story-state"), (cut > 0 ? title.slice(cut + 2) : title).replace(/^(\w+) for now after ([\d.]+ s)/, "$1, submitted $2 ago"));
    $("story-lines").replaceChildren(...lines.map((line) => {
      const parts = /^\s*(\S+)\s+(\S+ s)\s{2}(.*)$/.exec(line);
      if (!parts) return h("li", {}, line.trim());
      const feel = /fail|lost|revoked|expired|rejected/.test(parts[3]) ? "bad" : /^waits|queued again/.test(parts[3]) ? "warn" : parts[3] === "completed" ? "good" : "";
      return h("li", { "data-mood": feel }, parts[3], h("small", {}, `${parts[1]}  ${parts[2]}`));
    }));
  } catch (error) { say($("story-state"), error.message); }
}

function toast(words, feel = "good") {
  const made = h("div", { class: "toast", "data-mood": feel }, words);
  $("toasts").append(made);
  while ($("toasts").children.length > 4) $("toasts").firstChild.remove();
  setTimeout(() => made.remove(), feel === "bad" ? 9000 : 5000);
}

// -- the server --------------------------------------------------------------------------------------------------------

async function api(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: { Authorization: `Bearer ${state.token}`, ...(options.body ? { "Content-Type": "application/json" } : {}) }, cache: "no-store", credentials: "omit" });
  } catch { throw new Error("The dashboard does not answer."); }
  const told = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(told.error ?? `The dashboard answered ${answer.status}.`), { status: answer.status });
  return told;
}

let streaming = null;

async function connect() {
  streaming?.abort();
  const mine = (streaming = new AbortController());
  try {
    const answer = await fetch(`/api/stream${state.tasks ? "?tasks=1" : ""}`, { headers: { Authorization: `Bearer ${state.token}` }, signal: mine.signal, cache: "no-store", credentials: "omit" });
    if (answer.status === 401) return locked();
    if (!answer.ok) throw new Error(String(answer.status));
    state.heard = performance.now();
    linked("live");
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      state.heard = performance.now();
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const message = rest.slice(0, end);
        rest = rest.slice(end + 2);
        if (message.startsWith("data: ")) { state.retry = 0; received(JSON.parse(message.slice(6))); }
      }
    }
    throw new Error("ended");
  } catch (error) {
    if (mine.signal.aborted) return;
    if (state.link !== "ended") linked("lost"); // else that is known; it may be started again
    state.retry = Math.min(state.retry + 1, 6);
    setTimeout(() => { if (mine === streaming) connect(); }, 250 * 2 ** (state.retry - 1));
  }
}

function received(message) {
  const began = performance.now();
  for (const told of message.programs) {
    let known = programs.get(told.id);
    if (!known || told.history) programs.set(told.id, (known = { history: new Map(Object.entries(told.history ?? {})), events: [], ended: 0 }));
    else for (const view of told.look.pools) addPoint(known.history, view, told.look);
    known.heard = performance.now() - 1000 * (told.age ?? 0);
    const seen = { look: told.look, received: known.heard, late: null };
    if (!state.paused || !known.look) Object.assign(known, seen);
    else known.late = seen; // it may be the last one
    known.events.push(...told.events);
    known.events.splice(0, known.events.length - EVENTS);
    known.ended = 0;
  }
  state.looking = message.looking;
  if (!state.paused) state.budgets = message.budgets;
  else state.late = message.budgets;
  const alive = new Set(message.alive);
  for (const id of programs.keys()) if (!alive.has(id) && id !== state.program) programs.delete(id);
  if (current() && !current().ended && !alive.has(state.program)) {
    current().ended = performance.now();
    current().alone = !running().length;
    asking?.(null); // what it asked for cannot be done any more
  }
  if (message.ended) linked("ended");
  if (!state.paused) { follow(); draw(); }
  applied.last = performance.now() - began;
  applied.worst = Math.max(applied.worst, applied.last);
  applied.updates++;
}

function addPoint(history, view, look) {
  const past = history.get(String(view.number)) ?? [], last = past[past.length - 1];
  if (view.point) past.push(view.point);
  else if (view.state === "closed" && last) { // it was closed since the last look, and has nothing queued any more
    const t = look.pools.find((other) => other.point)?.point.t ?? look.at;
    past.push({ ...last, t, queued: view.queued, active: view.active, lag: view.lag, tenants: Object.fromEntries(Object.keys(last.tenants ?? {}).map((name) => [name, [0, 0]])) });
  }
  if (past.length > POINTS) past.shift();
  history.set(String(view.number), past);
}

const running = () => [...programs].filter(([, one]) => one.look && !one.ended);
const titleOf = (look) => `${look.program} (pid ${look.pid})`;

function follow() {
  // Choose a program if none is chosen. One that was alone and has ended is followed by the next one that starts: it was
  // started again. If there were others, the next click must not act on one of them: the user chooses.
  const others = running();
  if (!others.length || (current() && !(current().ended && current().alone))) return;
  const before = current()?.look, [id, next] = others.find(([, one]) => one.look.program === before?.program) ?? others[0];
  programs.delete(state.program);
  state.program = id;
  if (before) toast(`${titleOf(next.look)} has started, and is shown now.`);
}

function choose(id) {
  if (current()?.ended) programs.delete(state.program);
  state.program = id;
  draw();
}

function linked(now) {
  state.link = now;
  tellLink();
}

// What is wrong with the program that is shown: [state of the dot, word, seconds since when, banner]
function trouble() {
  const one = current(), now = performance.now();
  if (state.link === "lost") return ["lost", "reconnecting", null, "The dashboard does not answer. What you see is how it was. It is tried again."];
  if (!["live", "ended"].includes(state.link) || !one?.look) return null;
  const was = `What you see is how it was at ${clock(one.look.at)}.`;
  if (state.link === "ended") return ["ended", "ended", null, `${titleOf(one.look)} has ended, or has closed this page. What you see is how it was in the end, at ${clock(one.look.at)}.`];
  if (one.ended) return ["ended", "ended", null, `${titleOf(one.look)} has ended. ${was}${running().length ? " Choose another program to go on." : ""}`];
  if (now - state.heard > 1000 * QUIET) return ["silent", "no answer", (now - state.heard) / 1000, `The dashboard gives no answer. ${was}`];
  const quiet = (now - one.heard) / 1000;
  if (quiet > one.look.pause + LATE) return ["silent", "no answer", quiet, `${titleOf(one.look)} gives no answer: it may be stopped, or too busy. ${was}`];
  const held = one.look.pools.filter((view) => view.kind === "tasks").map((view) => view.held);
  if (held.length && Math.min(...held.map(Number)) > LATE) return ["silent", "loop held", Math.max(...held), `The event loop of ${titleOf(one.look)} gives no answer: some task computes without an await. Its pools are shown as they were.`];
  return null;
}

function tellLink() {
  const wrong = trouble(), one = current();
  const [dot, word, age] = state.paused ? ["paused", "paused", null] : wrong ?? [state.link, state.link, null];
  $("link").dataset.state = dot;
  say($("link-word"), word);
  say($("link-age"), age === null ? "" : `for ${age < 120 ? `${Math.floor(age)} s` : seconds(age)}`);
  $("banner").hidden = !wrong;
  $("banner").dataset.kind = wrong?.[0] === "lost" ? "bad" : "warn";
  if (wrong) say($("banner-text"), wrong[3]);
  offer(one?.ended ? running().filter(([, other]) => other.look.program === one.look.program) : []);
  for (const button of $("main").querySelectorAll("[data-act]")) button.disabled = Boolean(one?.ended || button.dataset.why);
  if (plots.live === !wrong) return;
  plots.live = !wrong;
  document.body.classList.toggle("stale", !plots.live);
  shown?.update?.();
}

function offer(others) {
  const [id, one] = others.sort(([, a], [, b]) => b.look.started_at - a.look.started_at)[0] ?? [];
  $("banner-show").hidden = !id;
  if (!id) return;
  say($("banner-show"), `Show ${titleOf(one.look)}, up ${runsFor(one.look)}`);
  $("banner-show").onclick = () => choose(id);
}

function runsFor(look) {
  const minutes = Math.floor((look.at - look.started_at) / 60);
  if (minutes < 1) return "< 1 min";
  return minutes < 120 ? `${minutes} min` : minutes < 2880 ? `${Math.floor(minutes / 60)} h` : `${Math.floor(minutes / 1440)} days`;
}

function locked() {
  linked("locked");
  $("main").replaceChildren(h("div", { class: "blank" }, h("h1", {}, "This link has no valid token"), h("p", {}, "Open the address that was printed when the dashboard started. It ends with #token=… and is new each time.")));
  shown = null;
}

// -- drawing -----------------------------------------------------------------------------------------------------------

const makers = { overview, tasks: tasksView, resources: resourcesView, workers: workersView, events: eventsView };
const made = {};
let shown = null;

function draw() {
  drawPrograms();
  if (!programs.size || !current()?.look) { tellLink(); return drawEmpty(); }
  const view = (made[state.tab] ??= makers[state.tab]());
  if (shown !== view) { $("main").replaceChildren(view.element); shown = view; }
  view.update();
  tellLink();
}

function drawEmpty() {
  if (state.link === "locked") return;
  const [title, ...more] = state.looking === null ? ["Connecting", h("p", {}, "Waiting for the first answer of the dashboard.")]
    : state.looking ? ["Looking at programs", h("p", {}, `${many(state.looking, "program")} found. Waiting for the first answer.`)]
    : ["No program can be seen", h("p", {}, "A program of this user shows itself when it is started like this:"), h("pre", {}, "HEADGATE_OBSERVE=1 python your_program.py"), h("p", {}, "or when it calls headgate.observe.publish(). It appears here within a second.")];
  if (shown === title) return;
  shown = title;
  $("main").replaceChildren(h("div", { class: "blank" }, h("h1", {}, title), ...more));
}

function drawPrograms() {
  const select = $("program");
  const known = [...programs].filter(([, one]) => one.look);
  const ids = JSON.stringify(known.map(([id]) => id));
  if (select.shown !== ids) {
    select.shown = ids;
    select.replaceChildren(...known.map(([id]) => h("option", { value: id })));
  }
  known.forEach(([, one], index) => say(select.options[index], `${titleOf(one.look)}, ${one.ended ? "ended" : `up ${runsFor(one.look)}`}`));
  if (select.value !== state.program) select.value = state.program;
  select.hidden = !known.length;
}

function go(tab) {
  state.tab = tab;
  for (const button of document.querySelectorAll(".tabs button")) {
    button.setAttribute("aria-selected", String(button.dataset.tab === tab));
    button.tabIndex = button.dataset.tab === tab ? 0 : -1;
  }
  $("main").setAttribute("aria-labelledby", `tab-${tab}`);
  draw();
}

// -- keys and settings -------------------------------------------------------------------------------------------------

function theme(next) {
  document.documentElement.dataset.theme = next;
  try { localStorage.setItem("headgate-theme", next); } catch { /* private windows */ }
  draw();
}

// As the system is, now and later, unless the user has chosen.
function followSystem() {
  let chosen = null;
  try { chosen = localStorage.getItem("headgate-theme"); } catch { /* private windows */ }
  document.documentElement.dataset.theme = chosen ?? (darkness.matches ? "dark" : "light");
}

function pause() {
  state.paused = !state.paused;
  $("pause").setAttribute("aria-pressed", String(state.paused));
  say($("pause"), state.paused ? "Go on" : "Pause");
  if (!state.paused) {
    for (const one of programs.values()) Object.assign(one, one.late);
    state.budgets = state.late ?? state.budgets;
    follow();
  }
  draw();
}

function moveRow(step) {
  const rows = [...$("main").querySelectorAll("tbody tr")];
  const at = rows.indexOf(document.activeElement);
  rows[at < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.max(0, Math.min(rows.length - 1, at + step))]?.focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const field = event.target.closest("input, select, textarea");
  if (field) {
    if (event.key === "Escape") { field.value = ""; field.dispatchEvent(new Event("input")); field.blur(); }
    return;
  }
  const tabs = Object.keys(makers);
  const keys = {
    j: () => moveRow(1), k: () => moveRow(-1), ArrowDown: () => document.activeElement.closest("tbody") && moveRow(1), ArrowUp: () => document.activeElement.closest("tbody") && moveRow(-1),
    p: pause, t: () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"), "?": () => $("keys").showModal(),
    "/": () => $("main").querySelector("[data-filter]")?.focus(), x: () => document.activeElement.closest("tr")?.querySelector("td.row-actions button")?.click(),
    ArrowRight: () => event.target.role === "tab" && step(1), ArrowLeft: () => event.target.role === "tab" && step(-1),
  };
  const step = (by) => { go(tabs[(tabs.indexOf(state.tab) + by + tabs.length) % tabs.length]); $(`tab-${state.tab}`).focus(); };
  if (/^[1-5]$/.test(event.key)) go(tabs[Number(event.key) - 1]);
  else if (keys[event.key.length === 1 ? event.key.toLowerCase() : event.key]) keys[event.key.length === 1 ? event.key.toLowerCase() : event.key]();
  else return;
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") event.preventDefault();
  else if (document.activeElement.closest("tbody")) event.preventDefault();
});

for (const button of document.querySelectorAll(".tabs button")) button.addEventListener("click", () => go(button.dataset.tab));
$("program").addEventListener("change", (event) => choose(event.target.value));
$("pause").addEventListener("click", pause);
$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("help").addEventListener("click", () => $("keys").showModal());
for (const dialog of document.querySelectorAll("dialog")) dialog.addEventListener("click", (event) => { if (event.target === dialog) { asking?.(null); dialog.close(); } });
$("confirm").addEventListener("submit", (event) => { event.preventDefault(); asking?.(true); });
$("confirm-no").addEventListener("click", () => asking?.(null));
$("confirm-input").addEventListener("invalid", (event) => { event.preventDefault(); $("confirm-wrong").hidden = false; $("confirm-input").select(); });
$("confirm-input").addEventListener("input", () => { $("confirm-wrong").hidden = true; });
$("confirm").addEventListener("cancel", (event) => { event.preventDefault(); asking?.(null); });
addEventListener("resize", () => draw());
setInterval(() => { if (!state.paused && !document.hidden && shown?.ticks) shown.update(); tellLink(); }, 250);

const token = /(?:^|[#&])token=([^&]+)/.exec(location.hash);
try {
  if (token) sessionStorage.setItem("headgate-token", token[1]); // as it is: tokens have no character that is escaped
  state.token = sessionStorage.getItem("headgate-token") ?? "";
} catch { state.token = token ? token[1] : ""; }
if (token) history.replaceState(null, "", location.pathname); // the token is not for screenshots and shared links
const darkness = matchMedia("(prefers-color-scheme: dark)");
darkness.addEventListener("change", followSystem);
followSystem();
window.headgate = { applied, state, received, connect, stop: () => streaming?.abort() }; // for tests
go("overview");
connect();
