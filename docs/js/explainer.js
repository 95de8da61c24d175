// Figures of how-it-works.md that can be touched. No library, no network. Each figure is drawn by a pure function of its
// parameters; the page holds the default drawing as an image (docs/images/explain-*.svg) for readers without scripts.
//   node docs/js/explainer.js write    writes those images (tests/unit/test_explainer.py compares them)
"use strict";

// ---- formulas

// Mean tokens per cycle when each drafted token is right with chance a, independently.
const tokensPerCycle = (k, a) => (a >= 1 ? k + 1 : (1 - a ** (k + 1)) / (1 - a));
// Time of a cycle in plain steps: one pass, plus for each drafted token its draft step and its further row.
const cycleCost = (k, draft, row) => 1 + k * (draft + row);
const speedUp = (k, a, draft, row) => tokensPerCycle(k, a) / cycleCost(k, draft, row);
const bestK = (a, draft, row, most = 16) =>
  Array.from({ length: most + 1 }, (_, k) => k).reduce((x, y) => (speedUp(y, a, draft, row) > speedUp(x, a, draft, row) ? y : x), 0);
// FLOP per byte of weights: each weight is used once per row (a multiplication and an addition) and read once.
const intensity = (rows, bits) => (2 * rows) / (bits / 8);
const knee = (machine) => machine.flops / machine.bandwidth;
const kneeRows = (machine, bits) => (knee(machine) * bits) / 16;
const attainable = (machine, x) => Math.min(machine.flops, x * machine.bandwidth);
// Mean number of different experts that a layer reads when each row picks `active` of `experts` evenly.
const expertsTouched = (rows, experts, active) => experts * (1 - (1 - active / experts) ** rows);
const H200 = { name: "H200", flops: 989e12, bandwidth: 4.8e12 };

// ---- drawing

const text = (x, y, s, more = "") => `<text x="${x}" y="${y}" font-size="13" fill="currentColor" stroke="none" ${more}>${s}</text>`;
const mid = 'text-anchor="middle"';
const box = (x, y, w, h, label, more = "") =>
  `<rect x="${x}" y="${y}" width="${w}" height="${h}" rx="5" fill="none" ${more}/>` + text(x + w / 2, y + h / 2 + 5, label, mid);
const line = (points, more = "") =>
  `<polyline fill="none" points="${points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ")}" ${more}/>`;
const arrow = (x1, y1, x2, y2, more = "") => line([[x1, y1], [x2, y2]], `marker-end="url(#tip)" ${more}`);
const ink = { good: "#2e9e5b", bad: "#d2554a", main: "#4a63c9" };

function frame(width, height, label, body, alone) {
  const style = alone ? "<style>svg{color:#444}@media (prefers-color-scheme:dark){svg{color:#ccc}}</style>" : "";
  const tip = '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>';
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" role="img" aria-label="${label}" font-family="sans-serif" stroke="currentColor" stroke-width="1.5" style="max-width:100%;height:auto">${style}<title>${label}</title>${tip}${body}</svg>`;
}

function drawRoofline({ rows, bits }, alone) {
  const x = (i) => 60 + (Math.log2(i) / 11) * 520;
  const y = (f) => 260 - (Math.log10(f / 1e12) / 3.2) * 220;
  const at = intensity(rows, bits), bend = knee(H200), now = attainable(H200, at);
  const ticks = [1, 4, 16, 64, 256, 1024].map((i) => text(x(i), 280, i, mid)).join("");
  const levels = [1, 10, 100, 1000].map((f) => text(52, y(f * 1e12) + 4, f, 'text-anchor="end"')).join("");
  const roof = line([[x(1), y(attainable(H200, 1))], [x(bend), y(H200.flops)], [x(2048), y(H200.flops)]], `stroke="${ink.main}" stroke-width="2.5"`);
  const split = line([[x(bend), 262], [x(bend), y(H200.flops)]], 'stroke-dasharray="4 4"');
  const words = text(x(10), 75, "memory-bound", mid) + text(x(700), 75, "compute-bound", mid) + text(x(bend), 30, `knee: ${bend.toFixed(0)} FLOP per byte`, mid);
  const dot = `<circle cx="${x(Math.min(at, 2048)).toFixed(1)}" cy="${y(now).toFixed(1)}" r="7" fill="${at < bend ? ink.good : ink.bad}"/>`;
  const axes = line([[60, 20], [60, 262], [585, 262]]) + text(320, 300, "arithmetic intensity, FLOP per byte", mid) + text(66, 16, "TFLOP per second");
  return frame(600, 310, `Roofline of an H200: ${rows} rows of ${bits}-bit weights`, axes + ticks + levels + split + roof + words + dot, alone);
}

function drawCycle({ k, a, draft, row }, alone) {
  const x = (n) => 50 + n * 32, y = (s) => 230 - Math.min(s, 8) * 26;
  const curve = Array.from({ length: 17 }, (_, n) => [x(n), y(speedUp(n, a, draft, row))]);
  const ticks = [0, 4, 8, 12, 16].map((n) => text(x(n), 250, n, mid)).join("") + [1, 2, 4, 6, 8].map((s) => text(42, y(s) + 4, `${s}×`, 'text-anchor="end"')).join("");
  const plain = line([[x(0), y(1)], [x(16), y(1)]], 'stroke-dasharray="4 4"') + text(x(16), y(1) - 6, "plain decoding", 'text-anchor="end"');
  const now = speedUp(k, a, draft, row);
  const dot = `<circle cx="${x(k)}" cy="${y(now).toFixed(1)}" r="7" fill="${now >= 1 ? ink.good : ink.bad}"/>`;
  const axes = line([[50, 15], [50, 232], [570, 232]]) + text(310, 272, "K, drafted tokens per cycle", mid) + text(56, 16, "speed-up");
  return frame(600, 280, `Speed-up by K when a drafted token is right with chance ${a}`, axes + ticks + plain + line(curve, `stroke="${ink.main}" stroke-width="2.5"`) + dot, alone);
}

function drawSteps({ step }, alone) {
  const drafts = ["blue", "because", "of", "rain"], chosen = ["blue", "because", "of", "sunlight"], x = (i) => 120 + i * 115;
  let body = text(10, 40, "text so far") + box(120, 18, 330, 34, "The sky is") + text(10, 98, "drafter") + text(10, 158, "target") + text(10, 218, "kept");
  for (let i = 0; i < 4; i++) {
    const right = drafts[i] === chosen[i];
    if (step > 0) body += box(x(i), 76, 100, 34, drafts[i], step > 1 && !right ? `stroke="${ink.bad}"` : 'stroke-dasharray="4 3"');
    if (step > 1) body += box(x(i), 136, 100, 34, chosen[i], `stroke="${ink.main}"`) + text(x(i) + 50, 128, right ? "=" : "≠", mid);
    if (step > 2) body += box(x(i), 196, 100, 34, chosen[i], `stroke="${right ? ink.good : ink.main}" stroke-width="2.5"`);
  }
  return frame(600, 240, "A cycle step by step: four drafted tokens, the target's choices, three accepted and one corrected", body, alone);
}

function drawExperts({ rows }, alone) {
  const x = (r) => 50 + (Math.log2(r) / 6) * 510, y = (n) => 230 - (n / 128) * 195;
  const all = Array.from({ length: 64 }, (_, r) => r + 1);
  const curve = line(all.map((r) => [x(r), y(expertsTouched(r, 128, 8))]), `stroke="${ink.main}" stroke-width="2.5"`);
  const each = line(all.map((r) => [x(r), y(expertsTouched(r, 128, 8) / r)]), `stroke="${ink.good}" stroke-width="2.5"`);
  const ticks = [1, 2, 4, 8, 16, 32, 64].map((r) => text(x(r), 250, r, mid)).join("") + [8, 64, 128].map((n) => text(42, y(n) + 4, n, 'text-anchor="end"')).join("");
  const names = text(x(20), y(122), "experts read per layer", mid) + text(x(14), y(20), "experts read per row", mid);
  const dot = `<circle cx="${x(rows).toFixed(1)}" cy="${y(expertsTouched(rows, 128, 8)).toFixed(1)}" r="7" fill="${ink.main}"/>`;
  const axes = line([[50, 15], [50, 232], [565, 232]]) + text(310, 272, "rows in one pass", mid);
  return frame(600, 280, `Experts of 128 that ${rows} rows read when each picks 8`, axes + ticks + curve + each + names + dot, alone);
}

function drawKv(_, alone) {
  let body = text(150, 20, "target: many layers", mid) + text(470, 20, "drafter: four layers", mid);
  for (let i = 0; i < 5; i++) body += box(60, 220 - i * 42, 90, 30, i === 4 ? "last layer" : `layer ${["1", "2", "…", "n − 1"][i]}`) + box(165, 220 - i * 42, 70, 30, "K/V", i > 2 ? `stroke="${ink.main}" stroke-width="2.5"` : "");
  for (let i = 0; i < 4; i++) body += box(420, 196 - i * 42, 100, 30, `query only ${i + 1}`);
  body += arrow(235, 109, 415, 125, `stroke="${ink.main}"`) + arrow(235, 67, 415, 90, `stroke="${ink.main}"`) + text(325, 60, "reads, never writes", mid);
  body += line([[105, 52], [105, 36], [560, 36], [560, 250], [470, 250]]) + arrow(470, 250, 470, 230) + text(330, 268, "last hidden state and the embedding of the newest token", mid);
  return frame(600, 280, "The drafter reads the K/V of two target layers and starts from the target's last hidden state", body, alone);
}

function drawHead(_, alone) {
  let body = box(20, 110, 90, 36, "hidden state") + arrow(110, 128, 160, 128);
  for (let i = 0; i < 8; i++) body += `<circle cx="190" cy="${40 + i * 26}" r="9" fill="${i === 2 || i === 5 ? ink.main : "none"}"/>`;
  body += text(190, 262, "1. score 2,048 centroids", mid);
  for (let i = 0; i < 8; i++) for (let j = 0; j < 6; j++) body += `<rect x="${300 + j * 24}" y="${30 + i * 26}" width="18" height="18" fill="${i === 2 || i === 5 ? ink.main : "none"}" ${i === 2 || i === 5 ? "" : 'opacity="0.35"'}/>`;
  body += arrow(202, 92, 294, 92) + arrow(202, 170, 294, 170) + text(370, 262, "2. score the tokens of 32 clusters", mid) + arrow(446, 128, 490, 128) + box(495, 110, 85, 36, "best token");
  return frame(600, 275, "A clustered head scores all centroids, then only the tokens of the best clusters: 4,096 of 262,144", body, alone);
}

function drawTree(_, alone) {
  const node = (x, y, s, ok) => `<circle cx="${x}" cy="${y}" r="24" fill="none" ${ok ? `stroke="${ink.good}" stroke-width="3"` : 'opacity="0.8"'}/>` + text(x, y + 5, s, mid);
  const edge = (a, b, ok) => line([a, b], ok ? `stroke="${ink.good}" stroke-width="3"` : 'opacity="0.6"');
  const body = edge([84, 120], [176, 70], false) + edge([84, 120], [176, 170], true) + edge([224, 70], [306, 45], false) + edge([224, 170], [306, 130], false) + edge([224, 170], [306, 205], true) + edge([354, 205], [446, 205], true) +
    node(60, 120, "newest", true) + node(200, 70, "the", false) + node(200, 170, "a", true) + node(330, 45, "old", false) + node(330, 130, "red", false) + node(330, 205, "fox", true) + node(470, 205, "ran", true) + text(470, 60, "one pass checks all six", mid) + text(470, 80, "drafted tokens", mid);
  return frame(600, 245, "A tree of six drafted tokens; the target accepts a, fox, ran along one path", body, alone);
}

function drawBlock(_, alone) {
  let body = text(20, 40, "steps") + text(20, 160, "block");
  for (let i = 0; i < 4; i++) body += box(100 + i * 115, 18, 80, 36, `draft ${i + 1}`) + (i ? arrow(65 + i * 115, 36, 98 + i * 115, 36) : "");
  body += text(330, 85, "each step knows the token before: four passes of the drafter", mid);
  body += box(100, 125, 425, 30, "one pass of a larger drafter") + [0, 1, 2, 3].map((i) => box(100 + i * 115, 185, 80, 36, `draft ${i + 1}`) + arrow(140 + i * 115, 155, 140 + i * 115, 183)).join("");
  return frame(600, 235, "Step drafters make one token per pass; block drafters make all of them in one pass", body, alone);
}

// ---- the page

const percent = (v) => `${Math.round(v * 100)} %`;
const STEPS = [
  "Before the cycle: only the text so far is known.",
  "Draft: a small network proposes four tokens, one after the other.",
  "Verify: one pass of the target gives its own choice at every position.",
  "Accept: three drafted tokens equal the target's choice; the fourth is replaced by the target's own. Four tokens from one pass.",
];
const FIGURES = {
  steps: { draw: drawSteps, start: { step: 3 }, sliders: [["step", "step", 0, 3, 1]], says: ({ step }) => STEPS[step] },
  roofline: {
    draw: drawRoofline, start: { rows: 1, bits: 16 },
    sliders: [["rows", "rows in one pass", 1, 512, 1], ["bits", "bits per weight", 4, 16, 4]],
    says: ({ rows, bits }) => `${rows} rows of ${bits}-bit weights: ${intensity(rows, bits).toFixed(0)} FLOP per byte, ${intensity(rows, bits) < knee(H200) ? "memory-bound: a further row is almost free" : "compute-bound: a further row costs its share"}. The knee is at ${kneeRows(H200, bits).toFixed(0)} rows.`,
  },
  cycle: {
    draw: drawCycle, start: { k: 4, a: 0.85, draft: 0.012, row: 0.006 },
    sliders: [["k", "K", 0, 16, 1], ["a", "chance that a drafted token is right", 0, 1, 0.01], ["draft", "cost of a draft step, in plain steps", 0, 0.4, 0.002], ["row", "cost of a further row, in plain steps", 0, 0.4, 0.002]],
    says: ({ k, a, draft, row }) => `${tokensPerCycle(k, a).toFixed(2)} tokens per cycle for ${cycleCost(k, draft, row).toFixed(2)} plain steps: ${speedUp(k, a, draft, row).toFixed(2)}× plain decoding${speedUp(k, a, draft, row) < 1 ? ", a loss" : ""}. The best K here is ${bestK(a, draft, row)}.`,
  },
  experts: {
    draw: drawExperts, start: { rows: 5 }, sliders: [["rows", "rows in one pass", 1, 64, 1]],
    says: ({ rows }) => `${rows} rows read ${expertsTouched(rows, 128, 8).toFixed(1)} of 128 experts, ${(expertsTouched(rows, 128, 8) / 8).toFixed(1)} times as many as one row, ${(expertsTouched(rows, 128, 8) / rows).toFixed(1)} per row.`,
  },
  kv: { draw: drawKv }, head: { draw: drawHead }, tree: { draw: drawTree }, block: { draw: drawBlock },
};

function attach(holder) {
  const figure = FIGURES[holder.dataset.figure];
  if (!figure) return;
  const now = { ...figure.start }, picture = document.createElement("div"), said = document.createElement("p");
  said.setAttribute("aria-live", "polite");
  const show = () => { picture.innerHTML = figure.draw(now, false); if (figure.says) said.textContent = figure.says(now); };
  holder.replaceChildren(picture);
  for (const [name, label, least, most, step] of figure.sliders || []) {
    const row = document.createElement("label"), input = document.createElement("input"), value = document.createElement("output");
    Object.assign(input, { type: "range", min: least, max: most, step, value: now[name] });
    Object.assign(row.style, { display: "flex", gap: ".6em", alignItems: "center", flexWrap: "wrap" });
    input.style.flex = "1 1 10em";
    const tell = () => { value.textContent = most === 1 ? percent(now[name]) : String(now[name]); };
    input.addEventListener("input", () => { now[name] = Number(input.value); tell(); show(); });
    tell();
    row.append(label, input, value);
    holder.append(row);
  }
  if (figure.says) holder.append(said);
  show();
}

if (typeof document !== "undefined") {
  const start = () => document.querySelectorAll("[data-figure]").forEach(attach);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start); else start();
} else {
  module.exports = { tokensPerCycle, cycleCost, speedUp, bestK, intensity, knee, kneeRows, attainable, expertsTouched, H200, FIGURES };
  if (require.main === module && process.argv[2] === "write") {
    const fs = require("fs"), path = require("path");
    for (const [name, figure] of Object.entries(FIGURES))
      fs.writeFileSync(path.join(__dirname, "..", "images", `explain-${name}.svg`), figure.draw(figure.start || {}, true) + "\n");
  }
}
