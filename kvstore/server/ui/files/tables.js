"use strict";
// Sorts a long table by the heading that is clicked, first in one direction and then in the other. Without JavaScript,
// and on phones, where headings are hidden, tables keep the order of the server.
(() => {
  const ROWS_MIN = 10;
  const SIZES = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, "µs": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, d: 86400, "%": 1 };
  const NUMBER = /^(?:in )?[<>]?([\d,.]+)(?: ?(B|KiB|MiB|GiB|TiB|µs|ms|s|min|h|d|%))?(?![\w:-])/;
  const { compare } = new Intl.Collator("en", { numeric: true });  // p2 before p10

  const worthOf = (text) => {
    const found = NUMBER.exec(text);
    return found && Number(found[1].replaceAll(",", "")) * (SIZES[found[2]] ?? 1);
  };
  const sort = (heading, body, column) => {
    const rows = [...body.rows].map((row) => {
      const text = row.cells[column].textContent.trim();
      return { row, text, worth: worthOf(text) };
    });
    const isNumeric = rows.some((each) => each.worth !== null);
    const isDown = heading.ariaSort ? heading.ariaSort === "ascending" : isNumeric;  // the largest number first
    rows.sort((one, other) => {
      if ((one.worth === null) !== (other.worth === null)) return one.worth === null ? 1 : -1;  // unknown comes last
      const order = one.worth === null ? compare(one.text, other.text) : one.worth - other.worth;
      return isDown ? -order : order;
    });
    for (const each of heading.parentElement.cells) each.ariaSort = null;
    heading.ariaSort = isDown ? "descending" : "ascending";
    body.append(...rows.map((each) => each.row));
  };

  if (matchMedia("(max-width:40rem)").matches) return;
  for (const table of document.querySelectorAll("section table")) {
    const body = table.tBodies[0];
    if (!table.tHead || body.rows.length < ROWS_MIN) continue;
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const button = document.createElement("button");
      button.append(...heading.childNodes);
      button.onclick = () => sort(heading, body, column);
      heading.append(button);
    });
  }
})();
