// A field above each long table that shows the rows with the words typed into it.
for (const table of document.querySelectorAll(".md-typeset table")) {
  const rows = [...table.querySelectorAll("tbody tr")];
  if (rows.length < 60) continue;
  const field = Object.assign(document.createElement("input"), {type: "search", className: "filter"});
  field.placeholder = field.ariaLabel = `Filter ${rows.length} rows: qwen3, refused, ...`;
  const texts = rows.map((row) => row.textContent.toLowerCase());
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    rows.forEach((row, number) => { row.hidden = !words.every((word) => texts[number].includes(word)); });
  });
  (table.closest(".md-typeset__scrollwrap") ?? table).before(field);
}
