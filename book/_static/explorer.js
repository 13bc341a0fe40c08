/* The layout explorer.
 *
 * A layout is a linear map over F2, from the bits of a position (register,
 * lane, warp, ...) to the bits of an element's coordinates. Each input bit has
 * a basis; the element at a position is the exclusive or of the bases whose
 * bits are set. This script draws both sides of that map and the map itself.
 *
 * It reads the book's layouts from the page (see book/_ext/nbx_explorer.py),
 * keeps its state in the address after "#", and asks nothing of the network.
 *
 * Integers stand for vectors over F2. A position has its inputs' bits side by
 * side, the first input lowest. An element has its outputs' bits side by side,
 * the last output lowest: row-major order.
 */
(() => {
  "use strict";

  const LIMIT = 1 << 14; // most positions, and most elements, that are drawn
  const START = { register: 1, lane: 9, offset: 9 }; // the position shown first
  const EXAMPLE = {
    bases: { register: [[0, 1]], lane: [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]] },
    shape: { row: 8, col: 8 },
  };

  // ------------------------------------------------------------ linear maps

  const range = (size) => Array.from({ length: size }, (_, i) => i);
  const log2 = (size) => 31 - Math.clz32(size);
  const bitsOf = (fields) => fields.reduce((sum, field) => sum + field.bits, 0);

  /* Named parts of an integer, the first one lowest. */
  function fieldsOf(pairs) {
    let shift = 0;
    return pairs.map(([name, bits]) => {
      shift += bits;
      return { name, bits, shift: shift - bits };
    });
  }

  const read = (field, value) => (value >> field.shift) & ((1 << field.bits) - 1);
  const join = (fields, parts) =>
    fields.reduce((value, field, i) => value | (parts[i] << field.shift), 0);

  /* Sets of columns whose sum is zero, a basis of the kernel; as bit masks. */
  function kernelOf(columns) {
    const pivots = [], kernel = [];
    columns.forEach((vector, j) => {
      let mask = 1 << j;
      for (const pivot of pivots) {
        if ((vector ^ pivot.vector) < vector) {
          vector ^= pivot.vector;
          mask ^= pivot.mask;
        }
      }
      if (vector) pivots.push({ vector, mask });
      else kernel.push(mask);
    });
    return kernel;
  }

  /* Tabulate a checked layout: the element of each position, and the reverse. */
  function tabulate({ bases, shape }) {
    const inputs = fieldsOf(Object.entries(bases).map(([name, list]) => [name, list.length]));
    const sizes = Object.entries(shape).map(([name, size]) => [name, log2(size)]);
    const outputs = fieldsOf(sizes.reverse()).reverse();
    const columns = Object.values(bases).flat().map((basis) => join(outputs, basis));
    const table = new Int32Array(1 << columns.length);
    for (let n = 1; n < table.length; n++) {
      table[n] = table[n & (n - 1)] ^ columns[log2(n & -n)];
    }
    const owners = Array.from({ length: 1 << bitsOf(outputs) }, () => []);
    table.forEach((element, n) => owners[element].push(n));
    return { bases, shape, inputs, outputs, columns, table, owners, kernel: kernelOf(columns) };
  }

  // --------------------------------------------------------- what was typed

  /* Say what is wrong, and in which field. */
  const refuse = (field, message) => {
    throw Object.assign(new Error(message), { field });
  };

  const isRecord = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  const isBelow = (end, value) => Number.isInteger(value) && value >= 0 && value < end;
  const vector = (numbers) => `(${numbers.join(", ")})`;
  const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

  /* JSON, or Python's way to write the same: tuples and 'single quotes'. */
  function parse(field, text, example) {
    const json = text.replace(/\(/g, "[").replace(/\)/g, "]").replace(/'/g, '"');
    try {
      return JSON.parse(json.replace(/,(\s*[\]}])/g, " $1"));
    } catch (error) {
      return refuse(field, `This cannot be read (${error.message}). Write it like ${example}.`);
    }
  }

  /* {"row": 8, "col": 8}, or sizes alone: 8, 8 or 8 x 8. */
  function readShape(text) {
    const example = '{"row": 8, "col": 8} or 8, 8';
    const list = /^[\s\d,x×]+$/.test(text) ? `[${text.replace(/[x×]/g, ",")}]` : text;
    let shape = parse("shape", list, example);
    if (Array.isArray(shape)) shape = Object.fromEntries(shape.map((s, i) => [`dim${i}`, s]));
    if (!isRecord(shape) || !Object.keys(shape).length) {
      refuse("shape", `A size for each dimension is needed, like ${example}.`);
    }
    for (const [name, size] of Object.entries(shape)) {
      const power = Number.isInteger(size) && size > 0 && 2 ** Math.round(Math.log2(size)) === size;
      if (!power) refuse("shape", `${name} is ${JSON.stringify(size)}; a size is a power of two.`);
    }
    const elements = Object.values(shape).reduce((product, size) => product * size);
    if (elements > LIMIT) {
      refuse("shape", `The shape has ${elements} elements; at most ${LIMIT} are drawn.`);
    }
    return shape;
  }

  function readBases(text, shape) {
    const example = '{"register": [[0, 1]], "lane": [[1, 0], [2, 0]]}';
    const bases = parse("bases", text, example);
    if (!isRecord(bases) || !Object.keys(bases).length) {
      refuse("bases", `Bases are listed by input, like ${example}.`);
    }
    const sizes = Object.entries(shape);
    for (const [input, list] of Object.entries(bases)) {
      if (!Array.isArray(list)) refuse("bases", `${input} needs a list, a basis for each bit.`);
      bases[input] = list.map((basis, bit) => {
        const numbers = Array.isArray(basis) ? basis : [basis];
        const here = `${input} bit ${bit} is ${vector(numbers)}`;
        if (numbers.length !== sizes.length) {
          refuse("bases", `${here}: ${plural(numbers.length, "coordinate")} for a shape of ${sizes.length}.`);
        }
        sizes.forEach(([name, size], i) => {
          if (!isBelow(size, numbers[i])) refuse("bases", `${here}; ${name} goes from 0 to ${size - 1}.`);
        });
        return numbers;
      });
    }
    const bits = Object.values(bases).flat().length;
    if (bits > log2(LIMIT)) {
      refuse("bases", `These are ${bits} bits; positions of at most ${log2(LIMIT)} bits are drawn.`);
    }
    return bases;
  }

  /* A layout as the two fields show it, an input a line. */
  function write({ bases, shape }) {
    const spaced = (value) => JSON.stringify(value).replace(/([,:])/g, "$1 ");
    const lines = Object.entries(bases).map(([name, list]) => `"${name}": ${spaced(list)}`);
    return { bases: `{${lines.join(",\n ")}}`, shape: spaced(shape) };
  }

  // ------------------------------------------------------------- the screen

  const root = document.getElementById("nbx-explorer");
  const book = JSON.parse(root.querySelector("script").textContent);
  const escape = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const field = (id, label, input) => `
    <label for="nbx-${id}">${label}</label>
    ${input.replace(" ", ` id="nbx-${id}" aria-describedby="nbx-${id}-problem" `)}
    <p class="problem" id="nbx-${id}-problem" role="alert"></p>`;
  const plain = 'spellcheck="false" autocapitalize="off" autocomplete="off"';
  const panel = (id, before, role) => `
    <section class="${id}" aria-labelledby="nbx-${id}-title">
      <h2 id="nbx-${id}-title"></h2>${before}
      <div class="scroll"><table ${role} aria-labelledby="nbx-${id}-title"></table></div>
      <p class="legend"></p>
    </section>`;

  root.insertAdjacentHTML("beforeend", `
    <div class="choice">${field("layout", "Layout", "<select ></select>")}<p class="origin"></p></div>
    <details>
      <summary>Bases and shape: change them</summary>
      ${field("bases", "Bases, one for each bit of an input", `<textarea rows="4" ${plain}></textarea>`)}
      ${field("shape", "Shape, a size for each coordinate", `<input ${plain}>`)}
    </details>
    <p class="facts"></p>
    <div class="readout"><p role="status"></p><p class="equation"></p></div>
    <div class="panels">
      ${panel("tile", "", 'role="grid"')}
      ${panel("hardware", '<div class="pages"></div>', 'role="grid"')}
      ${panel("map", "", "")}
    </div>`);

  const $ = (selector) => root.querySelector(selector);
  const $$ = (selector) => [...root.querySelectorAll(selector)];
  const [select, basesText, shapeText] = ["layout", "bases", "shape"].map((id) => $(`#nbx-${id}`));
  const tile = { table: $(".tile table"), cells: [], lit: [] };
  const hardware = { table: $(".hardware table"), cells: [], lit: [] };

  let map; // the layout shown, tabulated
  let place; // which inputs run along the hardware grid; see arrange
  let typed = write(EXAMPLE); // the reader's own text, kept while a layout of the book is shown
  let pick; // the chosen view: {kind: "element" | "slot" | "row", n: position, element}

  // --------------------------------------------------------------- geometry

  /* Rows and columns of the tile: leading outputs run down, the rest across. */
  function fold(outputs) {
    const bits = bitsOf(outputs);
    if (outputs.length === 1) {
      return { down: outputs, across: outputs, bits: Math.min(5, Math.ceil(bits / 2)) };
    }
    const skew = (cut) => Math.abs(bits - 2 * bitsOf(outputs.slice(cut)));
    const cut = range(outputs.length).slice(1).reduce((a, b) => (skew(b) < skew(a) ? b : a));
    const across = outputs.slice(cut);
    return { down: outputs.slice(0, cut), across, bits: bitsOf(across) };
  }

  /* Rows and columns of the hardware grid: lane by register. Where there is
   * no lane, two inputs if they make a grid (the row and column of tensor
   * memory); else one in rows of 32 (the offset in shared memory). */
  function arrange(inputs) {
    const used = inputs.filter(({ bits }) => bits);
    let row = inputs.find(({ name }) => name === "lane");
    let column = inputs.find(({ name }) => name === "register") ?? { bits: 0, shift: 0 };
    let whole = null;
    if (!row && used.length > 1 && used[0].bits < 8) [row, column] = used;
    if (!row) {
      whole = used[0] ?? inputs[0];
      const low = Math.min(5, whole.bits);
      column = { bits: low, shift: whole.shift };
      row = { bits: whole.bits - low, shift: whole.shift + low };
    }
    const others = used.filter((input) => ![row, column, whole].includes(input));
    const spoken = [...others, ...(whole ? [whole] : [row, column])].filter(({ bits }) => bits);
    return { row, column, whole, others, spoken };
  }

  const maskOf = ({ bits, shift }) => ((1 << bits) - 1) << shift;
  const pageOf = (n) => n & ~maskOf(place.row) & ~maskOf(place.column);
  const slotAt = (page, r, c) => page | (r << place.row.shift) | (c << place.column.shift);
  const rowOf = (n) => range(1 << place.column.bits).map((c) =>
    slotAt(pageOf(n), read(place.row, n), c));

  /* An element's first owner, if possible on a given page. */
  const ownerOf = (element, page) =>
    map.owners[element].find((n) => pageOf(n) === page) ?? map.owners[element][0];

  // ------------------------------------------------------------------ words

  const parts = (fields, value) => fields.map((part) => read(part, value));
  const coordinates = (element) => vector(parts(map.outputs, element));
  const names = (fields) => fields.map(({ name }) => name).join(", ");

  /* "warp 1 lane 9 register 0" */
  const position = (n, fields = place.spoken) =>
    fields.map((input) => `${input.name} ${read(input, n)}`).join(" ") || "the only position";

  function rowName(n) {
    const { whole, column, spoken } = place;
    if (!whole) return position(n, spoken.filter((input) => input !== column));
    return `${position(n)} to ${read(whole, n | maskOf(column))}`;
  }

  /* A list in words; a long one's end is counted, not shown. */
  function listed(items, between) {
    const rest = items.length > 8 ? [`${items.length - 8} more`] : [];
    return [...items.slice(0, 8), ...rest].join(between);
  }

  /* Positions in words: "lane 1 or 5, register 0" where they are a product. */
  function positionsInWords(slots) {
    const values = place.spoken.map((input) => [...new Set(slots.map((n) => read(input, n)))]);
    const product = values.reduce((size, list) => size * list.length, 1) === slots.length;
    if (slots.length < 2 || !product) return listed(slots.map((n) => position(n)), "; ");
    return place.spoken.map(({ name }, i) => `${name} ${listed(values[i], " or ")}`).join(", ");
  }

  /* What a view shows, in a sentence: the text that is read aloud. */
  function sentence({ kind, n, element }) {
    const owners = map.owners[element];
    const shared = owners.length > 1 ? `${owners.length} owners, ` : "";
    const words = positionsInWords(owners);
    if (kind === "row") {
      const held = [...new Set(rowOf(n).map((slot) => map.table[slot]))].map(coordinates);
      return `${rowName(n)}: ${plural(held.length, "element")}, ${listed(held, "; ")}`;
    }
    if (kind === "element") return `element ${coordinates(element)}: ${shared}${words || "no owner"}`;
    return `${position(n)}: element ${coordinates(element)}${shared && `, one of ${shared}${words}`}`;
  }

  /* Rank, kernel and image, in words. */
  function facts() {
    const { columns, kernel, owners, inputs } = map;
    const rank = columns.length - kernel.length;
    const without = owners.length - 2 ** rank;
    const bits = inputs.flatMap(({ name, bits }) => range(bits).map((bit) => `${name} bit ${bit}`));
    const said = [`${plural(columns.length, "input bit")}, ` +
      `${plural(log2(owners.length), "output bit")}, rank ${rank}.`];
    if (!kernel.length && !without) said.push("A permutation: each element has one owner.");
    if (kernel.length) {
      const copies = kernel.map((mask) => bits.filter((_, j) => (mask >> j) & 1).join(" with "));
      said.push(`Each element held has ${2 ** kernel.length} owners: ` +
        `toggling ${copies.join(", or ")} leads to the same element.`);
    }
    if (without) said.push(`${without} of ${owners.length} elements have no owner.`);
    return said.join(" ");
  }

  // ---------------------------------------------------------------- drawing

  /* Colour of a position: four lanes share a hue and differ in lightness. */
  function colour(n) {
    const key = place.whole ? place.column : place.row;
    const low = key.bits > 3 ? 2 : 0;
    const lane = read(key, n);
    return `--hue:${((lane >> low) * 360) >> (key.bits - low)};--shade:${low && lane & 3}`;
  }

  /* "9·1", lane and register: what a cell of the tile says. */
  function label(n) {
    if (place.whole) return read(place.whole, n);
    return read(place.row, n) + (place.column.bits ? `<i>·${read(place.column, n)}</i>` : "");
  }

  /* Fill a grid. `rowHead` and `cell` give {i, name, text}, and for a cell
   * also its kind and the position whose colour it wears. */
  function draw(grid, rows, columns, corner, columnHead, rowHead, cell) {
    const attributes = ({ i, name }) =>
      i === undefined ? "" : `tabindex="-1" data-i="${i}" aria-label="${escape(name)}"`;
    let longest = 0;
    const line = (r) => range(columns).map((c) => {
      const shown = cell(r, c);
      const text = columns > 32 ? "" : String(shown.text);
      longest = Math.max(longest, text.replace(/<.*?>/g, "").length);
      const style = shown.owner === undefined ? "" : colour(shown.owner);
      return `<td role="gridcell" class="${shown.kind}" style="${style}" ${attributes(shown)}>${text}</td>`;
    });
    const head = (r) => `<th scope="row" role="rowheader" ${attributes(rowHead(r))}>${rowHead(r).text}</th>`;
    const heads = range(columns).map((c) => `<th scope="col">${columnHead(c)}</th>`);
    grid.table.innerHTML =
      `<thead><tr><th scope="col"><span class="visually-hidden">${escape(corner)}</span></th>` +
      `${heads.join("")}</tr></thead>` +
      `<tbody>${range(rows).map((r) => `<tr>${head(r)}${line(r).join("")}</tr>`).join("")}</tbody>`;
    grid.columns = columns;
    grid.head = 8 + 8 * String(rowHead(rows - 1).text).length;
    grid.need = 4 + 6.7 * longest;
    grid.cells = [];
    for (const td of grid.table.querySelectorAll("td[data-i]")) grid.cells[td.dataset.i] = td;
    grid.lit = [];
    grid.stop = null;
  }

  /* Cells as wide as the panel allows; text where it can be read. */
  function fit({ table, columns, head, need }) {
    const width = table.parentElement.clientWidth - head - 8;
    const size = Math.max(5, Math.min(Math.max(36, need), Math.floor((4 * width) / columns) / 4));
    table.style.setProperty("--head", `${head}px`);
    table.style.setProperty("--cell", `${size}px`);
    table.style.setProperty("--columns", columns);
    table.classList.toggle("numbers", size >= 17);
    table.classList.toggle("words", size >= need);
  }

  /* Three panels side by side if they fit; else the map under the tile, and
   * the width shared by the number of columns, within bounds. */
  function share() {
    const wish = ({ columns, head, need }) => Math.max(200, head + 16 + columns * Math.max(36, need));
    const middle = $(".map table").offsetWidth + 16;
    const panels = $(".panels");
    const abreast = wish(tile) + middle + wish(hardware) + 48 <= panels.clientWidth;
    const part = (tile.columns + 4) / (tile.columns + hardware.columns + 8);
    const left = Math.min(0.64, Math.max(0.48, part));
    panels.classList.toggle("abreast", abreast);
    panels.style.setProperty("--left", abreast ? `${wish(tile)}px` : `${left}fr`);
    panels.style.setProperty("--middle", `${middle}px`);
    panels.style.setProperty("--right", `${1 - left}fr`);
    [tile, hardware].forEach(fit);
  }

  function drawTile() {
    const { down, across, bits } = fold(map.outputs);
    const page = pageOf(pick.n);
    const kinds = new Set();
    const sizes = Object.entries(map.shape).map(([name, size]) => `${name} ${size}`);
    $("#nbx-tile-title").textContent = `The tile: ${sizes.join(" × ")}`;
    draw(tile, map.owners.length >> bits, 1 << bits, names(down),
      (c) => parts(across, c).join(),
      (r) => ({ text: parts(down, r << bits).join() }),
      (r, c) => {
        const i = (r << bits) | c;
        const owner = ownerOf(i, page);
        const kind = owner === undefined ? "none" : pageOf(owner) === page ? "" : "away";
        kinds.add(kind);
        const text = owner === undefined ? "" : label(owner);
        return { i, name: `element ${coordinates(i)}`, text, kind, owner };
      });
    const { whole, row, column, others } = place;
    const dot = whole || !column.bits ? "" : `<i>·${escape(column.name)}</i>`;
    const key = escape((whole ?? row).name);
    const again = whole && row.bits ? ` modulo ${1 << column.bits}` : "";
    $(".tile .legend").innerHTML = [
      down === across ? `${1 << bits} elements to a row.` : `Down: ${escape(names(down))}.`,
      down === across ? "" : `Across: ${escape(names(across))}.`,
      `Colour: ${key}${again}. <span>Text: ${key}${dot}.</span>`,
      kinds.has("away") ? `Pale: held by another ${escape(names(others))}.` : "",
      kinds.has("none") ? "Hatched: no owner." : "",
    ].join(" ");
  }

  function drawHardware() {
    const { row, column, whole } = place;
    const page = pageOf(pick.n);
    const title = whole ? whole.name : names([row, column].filter(({ bits }) => bits));
    $("#nbx-hardware-title").textContent = `The hardware: ${title.replace(", ", " × ")}`;
    draw(hardware, 1 << row.bits, 1 << column.bits, (whole ?? row).name,
      (c) => (whole ? `+${c}` : c),
      (r) => {
        const n = slotAt(page, r, 0);
        return { i: n, name: rowName(n), text: read(whole ?? row, n) };
      },
      (r, c) => {
        const i = slotAt(page, r, c);
        const owner = ownerOf(map.table[i], page);
        const text = parts(map.outputs, map.table[i]).join();
        return { i, name: position(i), text, kind: owner === i ? "" : "replica", owner };
      });
    const across = column.bits && !whole ? ` Across: ${escape(column.name)}.` : "";
    $(".hardware .legend").innerHTML =
      `${whole ? "Row by row" : "Down"}: ${escape((whole ?? row).name)}.${across}` +
      ` Colours: as in the tile. <span class="words">Text: the element held.</span>` +
      (map.kernel.length ? " Marked corner: a replica." : "");
  }

  /* The matrix, a column for each input bit, under its toggle and its basis. */
  function drawMap() {
    const inputs = map.inputs.filter(({ bits }) => bits);
    // A gap after each group of columns takes up what the group's name needs.
    const line = (kind, head, entry, last = "") => `<tr class="${kind}"><th scope="row">${head}</th>` +
      inputs.map((input) => range(input.bits).map((bit) => {
        const j = input.shift + bit;
        return `<td data-c="${j}" class="${map.columns[j] ? "" : "zero"}">${entry(j, input, bit)}</td>`;
      }).join("") + "<td></td>").join("") + `<td class="sum">${last}</td></tr>`;
    const toggle = (j, { name }, bit) => {
      const full = escape(`${name} bit ${bit}, basis ${coordinates(map.columns[j])}`);
      return `<button type="button" data-j="${j}" aria-label="${full}">${bit}</button>`;
    };
    const groups = inputs.map(({ name, bits }) =>
      `<th scope="colgroup" colspan="${bits + 1}">${escape(name)}</th>`);
    const vectors = map.outputs.map((output) =>
      line("vector", escape(output.name), (j) => read(output, map.columns[j])));
    const rows = map.outputs.flatMap(({ name, bits, shift }) => range(bits).map((bit) =>
      line(bit ? "bit" : "bit first", `${escape(name)} bit ${bit}`, (j) =>
        (map.columns[j] >> (shift + bit)) & 1)));
    $("#nbx-map-title").textContent = "The map: bits in, bits out";
    $(".map .legend").textContent = "Lit columns are added: 1 ⊕ 1 = 0.";
    $(".map table").innerHTML =
      `<thead><tr><td></td>${groups.join("")}<th scope="col">sum</th></tr>` +
      `${line("toggles", "toggle", toggle, "⊕")}</thead>` +
      `<tbody>${vectors.join("")}</tbody><tbody>${rows.join("")}</tbody>`;
    for (const td of $$(".map .bit td")) td.classList.toggle("one", td.textContent === "1");
  }

  /* A selector for each input that is neither row nor column of the grid. */
  function drawPages() {
    $(".pages").innerHTML = place.others.map((input, k) => `<label>${escape(input.name)}
      <select data-k="${k}">${range(1 << input.bits).map((value) => `<option>${value}</option>`).join("")}
      </select></label>`).join("");
  }

  // ------------------------------------------------------ choosing a position

  function light(grid, indices, main) {
    for (const td of grid.lit) td.classList.remove("lit", "main");
    grid.lit = indices.map((i) => grid.cells[i]).filter(Boolean);
    for (const td of grid.lit) td.classList.add("lit");
    if (grid.lit.includes(grid.cells[main])) grid.cells[main].classList.add("main");
  }

  /* Show a view, chosen or only pointed at, in every panel. */
  function paint(view) {
    const { kind, n, element } = view;
    const row = kind === "row";
    const owned = map.owners[element].length > 0;
    light(tile, row ? rowOf(n).map((slot) => map.table[slot]) : [element], row ? -1 : element);
    light(hardware, row ? rowOf(n) : map.owners[element], row ? -1 : n);
    const free = (j) => row && (maskOf(place.column) >> j) & 1;
    const set = (j) => owned && (n >> j) & 1;
    for (const button of $$(".map button")) {
      const j = button.dataset.j;
      button.setAttribute("aria-pressed", free(j) ? "mixed" : set(j) ? "true" : "false");
    }
    for (const td of $$(".map td[data-c]")) td.classList.toggle("on", Boolean(set(td.dataset.c)));
    const bits = map.outputs.flatMap((output) =>
      range(output.bits).map((bit) => (element >> (output.shift + bit)) & 1));
    const sums = [...parts(map.outputs, element), ...bits];
    $$(".map tbody .sum").forEach((td, k) => {
      td.textContent = owned ? sums[k] : "–";
      td.classList.toggle("one", owned && k >= map.outputs.length && sums[k] === 1);
    });
    const terms = (chosen) => map.columns.filter((_, j) => chosen(j)).map(coordinates);
    $(".equation").textContent = !owned
      ? `No sum of bases is ${coordinates(element)}.`
      : `${terms(set).join(" ⊕ ") || "no bit set"} = ${coordinates(element)}` +
        (row && place.column.bits ? `, then ⊕ any of ${terms(free).join(", ")}` : "");
    $(".readout [role]").textContent = sentence(view);
  }

  /* Make a cell the one of its grid that Tab reaches. */
  function stopAt(grid, cell) {
    grid.stop?.setAttribute("tabindex", "-1");
    grid.stop = cell;
    grid.stop.setAttribute("tabindex", "0");
  }

  /* Choose a view: draw its page if another one is drawn, paint, remember. */
  function choose(view, redraw = false) {
    const turned = redraw || pageOf(view.n) !== pageOf(pick.n);
    const inTile = tile.table.contains(document.activeElement);
    pick = view;
    if (turned) {
      drawTile();
      drawHardware();
      share();
      for (const page of $$(".pages select")) page.value = read(place.others[page.dataset.k], pick.n);
    }
    paint(pick);
    const slot = hardware.cells[pick.n];
    stopAt(tile, tile.cells[pick.element]);
    stopAt(hardware, pick.kind === "row" ? slot.parentElement.cells[0] : slot);
    if (turned && inTile) tile.stop.focus();
    remember();
  }

  const slotView = (n) => ({ kind: "slot", n, element: map.table[n] });
  const rowView = (n) => ({ ...slotView(n & ~maskOf(place.column)), kind: "row" });
  const elementView = (element, near) =>
    ({ kind: "element", n: ownerOf(element, pageOf(near)) ?? near, element });

  function viewOf(cell) {
    const i = Number(cell.dataset.i);
    if (tile.table.contains(cell)) return elementView(i, pick.n);
    return cell.tagName === "TH" ? rowView(i) : slotView(i);
  }

  // ------------------------------------------------------- choosing a layout

  /* Show a checked layout, at a given view or at the position shown before. */
  function show(layout, view = () => undefined) {
    const before = Object.fromEntries((map?.inputs ?? []).map((input) =>
      [input.name, read(input, pick.n)]));
    map = tabulate(layout);
    place = arrange(map.inputs);
    const values = map.inputs.map(({ name, bits }) => (before[name] ?? START[name] ?? 0) & ((1 << bits) - 1));
    drawMap();
    drawPages();
    $(".facts").textContent = facts();
    choose(view() ?? slotView(join(map.inputs, values)), true);
  }

  /* Say a problem next to its field, and nothing next to the others. */
  function complain({ field, message }) {
    for (const name of ["layout", "bases", "shape"]) {
      $(`#nbx-${name}-problem`).textContent = name === field ? message : "";
      $(`#nbx-${name}`).setAttribute("aria-invalid", name === field);
    }
  }

  /* Show what the two fields say; if that is no layout, say why and stay. */
  function showText(view) {
    try {
      const shape = readShape(shapeText.value);
      const bases = readBases(basesText.value, shape);
      complain({});
      show({ bases, shape }, view);
    } catch (problem) {
      if (!problem.field) throw problem;
      const { field, message } = problem;
      complain({ field, message: `${message} Until then the layout below stays.` });
      $("details").open = true;
      if (!map) show(EXAMPLE, view);
    }
  }

  /* Put a layout of the book, or the reader's own, into the fields. */
  function turnTo(key, view) {
    const entry = book.find((layout) => layout.key === key);
    select.value = entry ? key : "";
    if (key === "") $("details").open = true;
    const text = entry ? write(entry) : typed;
    basesText.value = text.bases;
    shapeText.value = text.shape;
    basesText.rows = text.bases.split("\n").length + 1;
    $(".origin").innerHTML = entry
      ? `from <a href="${escape(entry.href)}">${escape(entry.page)}, ${escape(entry.heading)}</a>` : "";
    showText(view);
  }

  // ------------------------------------------------------------ the address

  let timer;
  function remember() {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const tight = (text) => text.replace(/\s*([,:[\]{}()])\s*/g, "$1");
      const { bases, shape } = typed;
      const state = new URLSearchParams(
        select.value ? { layout: select.value } : { bases: tight(bases), shape: tight(shape) });
      state.set(pick.kind === "row" ? "row" : "slot", parts(map.inputs, pick.n));
      if (pick.kind === "element") state.set("element", parts(map.outputs, pick.element));
      // Commas and brackets may stand in an address as they are.
      const readable = String(state).replace(/%(2C|2F|3A|5B|5D|28|29)/g, decodeURIComponent);
      history.replaceState(null, "", `#${readable}`);
    }, 200);
  }

  /* The view that an address names, if the layout has it. */
  function recall(state) {
    const value = (name, fields) => {
      const numbers = (state.get(name) ?? "").split(",").map(Number);
      const fits = (number, i) => isBelow(1 << fields[i].bits, number);
      const whole = state.get(name) && numbers.length === fields.length && numbers.every(fits);
      return whole ? join(fields, numbers) : undefined;
    };
    const [row, n] = ["row", "slot"].map((name) => value(name, map.inputs));
    const element = value("element", map.outputs);
    if (row !== undefined) return rowView(row);
    if (element !== undefined) return elementView(element, n ?? 0);
    return n === undefined ? undefined : slotView(n);
  }

  function restore() {
    const state = new URLSearchParams(location.hash.slice(1));
    const key = state.get("layout");
    if (state.has("bases")) typed = { bases: state.get("bases"), shape: state.get("shape") ?? "" };
    else if (map && !key) return; // a link to a heading
    const known = book.some((layout) => layout.key === key);
    turnTo(state.has("bases") ? "" : known ? key : book[0]?.key, () => recall(state));
    if (key && !known) complain({ field: "layout", message: `The book has no layout ${key}.` });
  }

  // ----------------------------------------------------------------- events

  const cellAt = (event) => event.target.closest("[data-i]");
  const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  let under = null; // the cell under the mouse

  for (const grid of [tile, hardware]) {
    grid.table.addEventListener("click", (event) => {
      const cell = cellAt(event);
      if (cell) choose(viewOf(cell));
    });
    // Not "pointerover": that also comes when the page moves under the mouse.
    grid.table.addEventListener("pointermove", (event) => {
      const cell = cellAt(event);
      if (cell && cell !== under && event.pointerType === "mouse") paint(viewOf(cell));
      under = cell;
    });
    grid.table.addEventListener("pointerleave", () => {
      under = null;
      paint(pick);
    });
    grid.table.addEventListener("keydown", (event) => {
      const cell = cellAt(event);
      const rows = grid.table.tBodies[0].rows;
      const first = grid === tile ? 1 : 0; // the hardware's row heads count
      const last = rows[0].cells.length - 1;
      const end = event.key === "Home" ? [0, first] : [rows.length - 1, last];
      let [r, c] = [cell.parentElement.sectionRowIndex, cell.cellIndex];
      if (event.key in ARROWS) [r, c] = [r + ARROWS[event.key][0], c + ARROWS[event.key][1]];
      else if (["Home", "End"].includes(event.key)) [r, c] = [event.ctrlKey ? end[0] : r, end[1]];
      else return;
      event.preventDefault();
      const next = rows[r]?.cells[Math.max(first, c)];
      if (!next) return;
      choose(viewOf(next));
      grid.stop.focus();
    });
  }
  new ResizeObserver(share).observe($(".panels"));

  $(".map").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const from = map.owners[pick.element].length ? pick.n : 0;
    choose(slotView(from ^ (1 << button.dataset.j)));
  });

  $(".pages").addEventListener("change", ({ target }) => {
    const input = place.others[target.dataset.k];
    const n = (pick.n & ~maskOf(input)) | (target.selectedIndex << input.shift);
    choose(pick.kind === "row" ? rowView(n) : slotView(n));
  });

  select.addEventListener("change", () => turnTo(select.value));
  for (const text of [basesText, shapeText]) {
    text.addEventListener("input", () => {
      typed = { bases: basesText.value, shape: shapeText.value };
      select.value = "";
      $(".origin").textContent = "";
      showText();
      remember();
    });
  }

  const groups = [...new Set(book.map(({ page }) => page))].map((page) => {
    const options = book.filter((layout) => layout.page === page).map((layout) =>
      `<option value="${escape(layout.key)}">${escape(layout.name)}</option>`);
    return `<optgroup label="${escape(page)}">${options.join("")}</optgroup>`;
  });
  select.innerHTML = `${groups.join("")}<option value="">your own</option>`;
  window.addEventListener("hashchange", restore);
  restore();
})();
