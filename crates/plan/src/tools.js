// An element with properties, and one of a picture with attributes, each at the end of its parent.
const make = (kind, parent, properties = {}) => {
  const made = Object.assign(document.createElement(kind), properties);
  parent.append(made);
  return made;
};
const draw = (kind, parent, attributes, text = "") => {
  const made = document.createElementNS(parent.namespaceURI, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  parent.append(made);
  return made;
};
const picture = (parent, width, height, label = "") => {
  parent.insertAdjacentHTML("beforeend", `<svg viewBox="0 0 ${width} ${height}" role="img"></svg>`);
  parent.lastElementChild.setAttribute("aria-label", label);
  return parent.lastElementChild;
};
// Three digits of a number, and of one with a unit.
const three = (it) => it >= 1000 ? (+it.toPrecision(3)).toLocaleString("en") : it.toPrecision(3);
const scaled = (value, units) => {
  const [unit, scale] = units.find(([, scale]) => value >= 0.9995 * scale) ?? units.at(-1);
  return `${+(value / scale).toPrecision(3)} ${unit}`;
};
const size = (it) => scaled(it, [["PB", 1e15], ["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]]);
const time = (it) => it === 0 ? "0" : scaled(it, [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]]);
// Round numbers from 0 to the most: about so many, each 1, 2 or 5 times a power of ten after the last.
const ticks = (most, count = 5) => {
  const rough = Math.max(most, 1e-15) / count, ten = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((it) => it * ten).find((it) => it >= rough * (1 - 1e-9));
  return Array.from({ length: Math.floor(most / step * (1 + 1e-9)) + 1 }, (_, at) => +(at * step).toPrecision(6));
};
