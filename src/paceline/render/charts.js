"use strict";
(async () => {
  // A script element that is made here counts as inline, which the content policy allows.
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  // A stream of our own, not a Blob's, which another process reads: so all is drawn before the page
  // counts as loaded.
  const source = new ReadableStream({ start(to) { to.enqueue(bytes); to.close(); } });
  const plain = source.pipeThrough(new DecompressionStream("gzip"));
  const library = document.createElement("script");
  library.textContent = await new Response(plain).text();
  document.head.append(library);

  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  // A drag on a touch screen scrolls the page.
  const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
  const config = { responsive: true, displayModeBar: false, doubleClick: "reset" };

  // plotly knows no style sheets: put in what the variables stand for now.
  function themed(value, style) {
    if (typeof value === "string" && value.startsWith("var(")) {
      return style.getPropertyValue(value.slice(4, -1)).trim();
    }
    if (Array.isArray(value)) return value.map((item) => themed(item, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item, style)]));
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    for (const [name, chart] of Object.entries(charts)) {
      const { data, layout } = themed(chart, style);
      Plotly.react(`chart-${name}`, data, { ...layout, dragmode }, config);
    }
  }

  draw();
  dark.addEventListener("change", draw);
})();
