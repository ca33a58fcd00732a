() => {
  const items = [...document.querySelectorAll("a[href], button, input, select")];
  const clean = text => text.replace(/\s+/g, " ").trim();
  const plain = text => clean(text).replaceAll("[", "(").replaceAll("]", ")");
  const quoted = text => `"${plain(text).replaceAll('"', "'")}"`;
  const roles = { A: "link", BUTTON: "button", SELECT: "select" };
  const role = item => roles[item.tagName] || (item.type === "checkbox" ? "checkbox" : "textbox");
  const isField = item => !["link", "button"].includes(role(item));
  const nameOf = item => clean(isField(item) ? item.name : item.textContent);
  const value = item => {
    if (role(item) === "checkbox") return item.checked ? "yes" : "no";
    return isField(item) ? item.value : "";
  };
  const describe = (item, number) => {
    const start = `[${number}] ${role(item)} ${quoted(nameOf(item))}`;
    const options = () => [...item.options].map(one => quoted(one.text).slice(1, -1)).join(", ");
    if (role(item) === "textbox") return `${start} value ${quoted(item.value)}`;
    if (role(item) === "select") return `${start} value ${quoted(item.value)} of ${options()}`;
    return role(item) === "checkbox" ? `${start} ${value(item)}` : start;
  };
  const texts = node => [...node.childNodes].flatMap(child => {
    const number = items.indexOf(child) + 1;
    if (number) return [describe(child, number)];
    if (child.nodeType !== Node.TEXT_NODE) return texts(child);
    const isShown = clean(child.data) && !child.parentElement.closest("label");
    return isShown ? [plain(child.data)] : [];
  });
  const blocks = [...document.querySelectorAll("h1, p, tr")];
  const lines = blocks.map(block => (block.tagName === "H1" ? "# " : "") + texts(block).join(" "));
  const record = item => ({
    role: role(item), name: nameOf(item), value: value(item), target: item.getAttribute("href") || "",
    options: role(item) === "select" ? [...item.options].map(one => one.text) : [],
  });
  return { text: lines.join("\n"), items: items.map(record) };
}
