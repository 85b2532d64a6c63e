// A table as a file that spreadsheets read.

/** One cell: quoted where it must be. A text that a spreadsheet would take for a formula is made a text. */
function cell(value) {
  if (value === null || value === undefined) return "";
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export const csv = (head, rows) => [head, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";

export function saveCsv(name, head, rows) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csv(head, rows)], { type: "text/csv" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
