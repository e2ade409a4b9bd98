"use strict";
(() => {
  const COLOURS = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"];
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x"];
  const COSTS = {
    "peak memory": { key: "peak", unit: "bytes" },
    "index size": { key: "index_bytes", unit: "bytes" },
    "time to index": { key: "index_s", unit: "seconds" },
    "median query time": { key: "p50", unit: "milliseconds" },
    "95th percentile query time": { key: "p95", unit: "milliseconds" },
  };
  const PAGE = 50;
  const byId = (id) => document.getElementById(id);
  const told = JSON.parse(byId("cells").textContent);
  const chosen = { page: 0, filter: "all", search: "" };
  const unique = (values) => [...new Set(values)];
  const names = unique(told.cells.map((cell) => cell.retriever));
  const size = (n) => n.toLocaleString("en");

  const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // Plotly reads tags in names

  function element(kind, className, text) {
    const made = document.createElement(kind);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function select(parent, label, key, options, shown, changed) {
    const box = element("label", "", label);
    const list = element("select");
    list.dataset.key = key;
    options.forEach((option, at) => {
      const entry = element("option", "", shown(option));
      entry.value = at;
      entry.selected = option === chosen[key];
      list.append(entry);
    });
    list.addEventListener("change", () => {
      chosen[key] = options[Number(list.value)];
      changed();
    });
    box.append(list);
    parent.append(box);
  }

  const own = () => told.cells.filter((cell) => cell.benchmark === chosen.benchmark);
  const sizes = () => unique(own().map((cell) => cell.n)).sort((a, b) => a - b);
  const label = (cell) => plain(cell.retriever + (told.seeds > 1 ? ` (seed ${cell.seed})` : ""));

  function controls() {
    const metrics = unique(own().flatMap((cell) => Object.keys(cell.metrics)));
    if (!metrics.includes(chosen.metric)) chosen.metric = metrics.includes("hit@1") ? "hit@1" : metrics[0];
    if (!sizes().includes(chosen.n)) chosen.n = sizes().at(-1);
    const parent = byId("controls");
    parent.replaceChildren();
    if (told.benchmarks.length > 1) select(parent, "benchmark", "benchmark", told.benchmarks, String, all);
    if (metrics.length) select(parent, "metric", "metric", metrics, String, plots);
    select(parent, "N", "n", sizes(), size, () => { plots(); queryControls(); });
    select(parent, "cost", "cost", Object.keys(COSTS), String, plots);
  }

  function curves(value) {
    const groups = new Map();
    for (const cell of own().sort((a, b) => a.n - b.n)) {
      const found = value(cell);
      if (found === null || found === undefined) continue;
      if (!groups.has(label(cell))) groups.set(label(cell), []);
      groups.get(label(cell)).push({ cell, found });
    }
    return groups;
  }

  function style(cell) {
    const at = names.indexOf(cell.retriever);
    return { colour: COLOURS[at % COLOURS.length], symbol: SYMBOLS[Math.floor(at / COLOURS.length) % SYMBOLS.length] };
  }

  function draw(id, traces, x, y) {
    const css = getComputedStyle(document.documentElement);
    const ink = css.getPropertyValue("--ink").trim();
    const axis = { gridcolor: css.getPropertyValue("--grid").trim(), zeroline: false, linecolor: css.getPropertyValue("--line").trim() };
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 12 },
      margin: { l: 60, r: 12, t: 8, b: 48 }, height: 380, hovermode: "closest",
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, xaxis: { ...axis, ...x }, yaxis: { ...axis, ...y },
    };
    Plotly.react(byId(id), traces, layout, { displayModeBar: false, responsive: true });
  }

  const logN = () => ({ type: "log", title: { text: "documents N" }, tickvals: sizes(), ticktext: sizes().map(size) });

  function plots() {
    if (!own().some((cell) => Object.keys(cell.metrics).length)) return byId("plots").setAttribute("hidden", "");
    byId("plots").removeAttribute("hidden");
    byId("curve-title").textContent = `${chosen.metric} as the corpus grows, with 95% intervals`;
    const traces = [];
    for (const [name, points] of curves((cell) => cell.metrics[chosen.metric])) {
      const { colour, symbol } = style(points[0].cell);
      const x = points.map((point) => point.cell.n);
      const band = { x, legendgroup: name, showlegend: false, hoverinfo: "skip", mode: "lines", line: { width: 0 } };
      traces.push({ ...band, y: points.map((point) => point.found[1]) });
      traces.push({ ...band, y: points.map((point) => point.found[2]), fill: "tonexty", fillcolor: `${colour}2e` });
      traces.push({
        x, y: points.map((point) => point.found[0]), name, legendgroup: name, mode: "lines+markers",
        line: { color: colour }, marker: { color: colour, symbol, size: 8 },
        customdata: points.map((point) => point.found),
        hovertemplate: "%{y:.3f} [%{customdata[1]:.3f}, %{customdata[2]:.3f}] at N=%{x:,}<extra>%{fullData.name}</extra>",
      });
    }
    draw("curve", traces, logN(), { range: [-0.02, 1.04], title: { text: chosen.metric } });
    front();
    const { key, unit } = COSTS[chosen.cost];
    byId("cost-title").textContent = `${chosen.cost} as the corpus grows`;
    const costs = [...curves((cell) => cell[key])].map(([name, points]) => {
      const { colour, symbol } = style(points[0].cell);
      const line = { x: points.map((point) => point.cell.n), y: points.map((point) => point.found * (unit === "milliseconds" ? 1000 : 1)), name, mode: "lines+markers" };
      return { ...line, line: { color: colour }, marker: { color: colour, symbol, size: 8 } };
    });
    draw("cost", costs, logN(), { type: "log", title: { text: unit }, dtick: "D2", tickformat: unit === "bytes" ? "~s" : "~r" });
  }

  function front() {
    byId("front-title").textContent = `${chosen.metric} against latency at N = ${size(chosen.n)}`;
    const cells = own().filter((cell) => cell.n === chosen.n && cell.metrics[chosen.metric] && cell.p50);
    const traces = cells.map((cell) => {
      const { colour, symbol } = style(cell);
      const [value, low, high] = cell.metrics[chosen.metric];
      return {
        x: [1000 * cell.p50], y: [value], name: label(cell), mode: "markers", marker: { color: colour, symbol, size: 11 },
        error_y: { array: [high - value], arrayminus: [value - low], color: colour, thickness: 1 },
      };
    });
    const best = [];
    for (const cell of [...cells].sort((a, b) => a.p50 - b.p50 || b.metrics[chosen.metric][0] - a.metrics[chosen.metric][0])) {
      if (!best.length || cell.metrics[chosen.metric][0] > best.at(-1)[1]) best.push([1000 * cell.p50, cell.metrics[chosen.metric][0]]);
    }
    traces.unshift({
      x: best.map((point) => point[0]), y: best.map((point) => point[1]), name: "Pareto front", mode: "lines",
      line: { dash: "dot", color: "#888888", shape: "hv" }, hoverinfo: "skip",
    });
    draw("front", traces, { type: "log", title: { text: "median milliseconds of one query alone" }, tickformat: "~r", dtick: "D2" }, { range: [-0.02, 1.04], title: { text: chosen.metric } });
  }

  // Single queries: unpacked when the section comes into view.

  let answers = null;

  async function unpack() {
    const packed = byId("answers").textContent.trim();
    if (!packed) return { tasks: [], rankings: [] };
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  const here = () => answers.rankings.filter((one) => answers.tasks[one.task].benchmark === chosen.benchmark && one.n === chosen.n && answers.tasks[one.task].seed === chosen.seed);

  const FILTERS = {
    all: () => true, // ranks of the first relevant document: 0 where none was returned, -1 where it was not asked
    "A right, B wrong": (a, b) => a === 1 && b !== 1 && b >= 0,
    "A wrong, B right": (a, b) => a !== 1 && a >= 0 && b === 1,
    "both wrong": (a, b) => a !== 1 && a >= 0 && b !== 1 && b >= 0,
    "both right": (a, b) => a === 1 && b === 1,
  };

  function queryControls() {
    const parent = byId("query-controls");
    parent.replaceChildren();
    byId("list").replaceChildren();
    byId("pages").replaceChildren();
    byId("count").textContent = "";
    if (!answers) return;
    const seeds = unique(answers.tasks.filter((task) => task.benchmark === chosen.benchmark).map((task) => task.seed));
    if (!seeds.includes(chosen.seed)) chosen.seed = seeds[0];
    const rows = here().map((one) => one.retriever);
    if (!rows.length) {
      byId("count").textContent = "No answers were kept for this size.";
      return;
    }
    if (!rows.includes(chosen.a)) chosen.a = rows[0];
    if (!rows.includes(chosen.b)) chosen.b = rows.at(-1);
    const again = () => { chosen.page = 0; list(); };
    if (seeds.length > 1) select(parent, "seed", "seed", seeds, String, () => { chosen.page = 0; queryControls(); });
    select(parent, "A", "a", rows, String, again);
    select(parent, "B", "b", rows, String, again);
    select(parent, "show", "filter", Object.keys(FILTERS), String, again);
    const box = element("label", "", "search");
    const input = element("input");
    input.type = "search";
    input.value = chosen.search;
    input.addEventListener("input", () => { chosen.search = input.value; again(); });
    box.append(input);
    parent.append(box);
    list();
  }

  function list() {
    const rows = here();
    const task = answers.tasks[rows[0].task];
    const [a, b] = [chosen.a, chosen.b].map((name) => rows.find((one) => one.retriever === name));
    const wanted = chosen.search.toLowerCase();
    const found = task.queries.map((_, at) => at).filter((at) =>
      FILTERS[chosen.filter](a.first[at], b.first[at]) && task.queries[at].join(" ").toLowerCase().includes(wanted));
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    chosen.page = Math.min(chosen.page, pages - 1);
    byId("count").textContent = `${size(found.length)} of ${size(task.queries.length)} queries; right: a relevant document first`;
    byId("list").replaceChildren(...found.slice(chosen.page * PAGE, (chosen.page + 1) * PAGE).map((at) => query(task, rows, at)));
    const parent = byId("pages");
    parent.replaceChildren();
    if (pages > 1) {
      for (const [text, step] of [["back", -1], ["on", 1]]) {
        const button = element("button", "", text);
        button.disabled = chosen.page + step < 0 || chosen.page + step >= pages;
        button.addEventListener("click", () => { chosen.page += step; list(); byId("queries").scrollIntoView(); });
        parent.append(button);
      }
      parent.append(element("span", "quiet", `page ${chosen.page + 1} of ${pages}`));
    }
  }

  function query(task, rows, at) {
    const box = element("details");
    const head = element("summary");
    head.append(element("span", "identity", task.queries[at][0]), element("span", "query", task.queries[at][1]));
    const ranks = element("span", "ranks");
    for (const one of [chosen.a, chosen.b].map((name) => rows.find((row) => row.retriever === name))) {
      const rank = one.first[at];
      const mark = element("span", rank === 1 ? "rank first" : rank ? "rank" : "rank none", rank > 0 ? `${rank}` : rank ? "?" : "–");
      const shown = rank > 0 ? `first relevant document at rank ${rank}` : rank ? "not asked" : "no relevant document returned";
      mark.title = `${one.retriever}: ${shown}`;
      ranks.append(mark);
    }
    head.append(ranks);
    box.append(head);
    box.addEventListener("toggle", () => {
      if (!box.open || box.childElementCount > 1) return;
      const parts = element("div", "answers");
      parts.append(column("relevant", task.golds[at].map((number) => [number, true]), task));
      for (const one of rows) {
        const golds = new Set(task.golds[at]);
        const part = column(one.retriever, one.shown[at].map((number) => [number, golds.has(number)]), task);
        if (one.errors[at]) part.append(element("p", "failed", one.errors[at]));
        parts.append(part);
      }
      box.append(parts);
    }, { passive: true });
    return box;
  }

  function column(title, entries, task) {
    const part = element("div");
    part.append(element("h4", "", title));
    const items = element("ol");
    for (const [number, gold] of entries) {
      const [identity, text, length] = task.documents[number];
      const item = element("li", gold ? "document gold" : "document");
      item.append(element("div", "identity", identity));
      const shown = element("div", "text", text === null ? "(its text was not kept)" : text);
      shown.dir = "auto";
      item.append(shown);
      if (text !== null && length > text.length) item.append(element("div", "quiet", `… of ${size(length)} characters`));
      items.append(item);
    }
    part.append(entries.length ? items : element("p", "quiet", "nothing"));
    return part;
  }

  function all() {
    controls();
    plots();
    queryControls();
  }

  chosen.benchmark = told.benchmarks[0];
  chosen.cost = "peak memory";
  all();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", plots);
  new IntersectionObserver(async (entries, observer) => {
    if (answers || !entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    byId("count").textContent = "unpacking …";
    answers = await unpack();
    queryControls();
  }, { rootMargin: "400px" }).observe(byId("queries"));
})();
