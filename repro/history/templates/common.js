// What the explorer and memory maps have in common.

const inEnglish = new Intl.NumberFormat("en");
const many = (value) => inEnglish.format(Math.round(value));
const count = (value, what) => `${many(value)} ${what}${value === 1 ? "" : "s"}`;

function html(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

async function unpacked(id) {
  const raw = atob(document.getElementById(id).textContent), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

const textOf = async (id) => new TextDecoder().decode(await unpacked(id));

// Where a request's last entry at or before a step is, in a list that is sorted by step.
function upTo(entries, step) {
  let [low, high] = [0, entries.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((entries[middle][0] ?? entries[middle]) <= step) low = middle + 1;
    else high = middle;
  }
  return low;
}

function numbers(color) {
  const hex = color.slice(1);
  return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// Colours

const styleOf = (element) => (name) => getComputedStyle(element).getPropertyValue(name).trim();

// Dark is what JupyterLab's theme says, elsewhere what the system says.
const system = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => {
  const { jpThemeLight } = document.body.dataset;
  return jpThemeLight ? jpThemeLight === "false" : system.matches;
};

// Calls `redraw` whenever that changes, until what it returns is called.
function onTheme(redraw) {
  const watching = new MutationObserver(redraw);
  watching.observe(document.body, { attributeFilter: ["data-jp-theme-light"] });
  system.addEventListener("change", redraw);
  return () => { watching.disconnect(); system.removeEventListener("change", redraw); };
}

function rgb(hue, saturation, light) {
  const at = (n) => {
    const k = (n + hue / 30) % 12;
    const part = Math.max(-1, Math.min(k - 3, 9 - k, 1));
    return Math.round(255 * (light - saturation * Math.min(light, 1 - light) * part));
  };
  return [at(0), at(8), at(4)];
}

// Colours of neighbouring requests lie far apart: steps of the golden angle.
function colorOf(request) {
  if (request < 0) return isDark() ? [225, 225, 225] : [50, 50, 60];
  return rgb((request * 137.508) % 360, 0.5, (isDark() ? 0.58 : 0.55) + 0.07 * ((request % 3) - 1));
}

const mixed = (color, ground, share) => color.map((value, i) => Math.round(value * share + ground[i] * (1 - share)));
