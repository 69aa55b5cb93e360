(() => {
  const bytes = (n) => {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (Math.abs(n) < 1024) return unit === "B" ? `${n} B` : `${n.toFixed(2)} ${unit}`;
      n /= 1024;
    }
    return `${n.toFixed(2)} TiB`;
  };
  const element = (name, text) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;  // not innerHTML: names of modules are untrusted
    return node;
  };

  const addCursor = (figure) => {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const svg = figure.querySelector("svg");
    const tip = figure.querySelector(".lt-tip");
    const cursor = figure.querySelector(".lt-cursor");
    const columns = data.label_of_column.length;
    if (!columns) return;
    let at = 0;

    const show = (column) => {
      at = Math.max(0, Math.min(columns - 1, column));
      const x = (data.edges[at] + data.edges[at + 1]) / 2;
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.style.visibility = "visible";
      const total = data.bands.reduce((sum, band) => sum + band[2][at], 0);
      tip.replaceChildren(
        element("p", `${data.starts[at]}: ${data.labels[data.label_of_column[at]]}`),
        ...[["all", null, total], ...data.bands.map((band) => [band[0], band[1], band[2][at]]).reverse()]
          .filter((row) => row[2] > 0)
          .map(([name, colour, size]) => {
            const row = element("div");
            if (colour) {
              const swatch = element("i");
              swatch.className = "lt-swatch";
              swatch.style.background = `var(--${colour})`;
              row.append(swatch);
            }
            row.append(element("span", name), element("b", bytes(size)));
            return row;
          }),
      );
      tip.hidden = false;
      const box = svg.getBoundingClientRect();
      const left = (x / svg.viewBox.baseVal.width) * box.width;
      const right = left > box.width / 2;
      tip.style.left = `${Math.max(0, right ? left - tip.offsetWidth - 4 : left + 24)}px`;
      tip.style.top = "2.5rem";
    };
    const hide = () => {
      tip.hidden = true;
      cursor.style.visibility = "hidden";
    };

    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      if (x < data.edges[0] || x > data.edges[columns]) return hide();
      let low = 0;
      let high = columns;
      while (low < high - 1) {
        const middle = (low + high) >> 1;
        if (data.edges[middle] <= x) low = middle;
        else high = middle;
      }
      show(low);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      show(at + step);
    });

    const areas = [...svg.querySelectorAll("path[data-band]")];
    for (const item of figure.querySelectorAll("li[data-band]")) {
      // Areas overlap, so a band is highlighted by fading the colours of the others.
      const fade = (others) => areas.forEach((area) => {
        area.style.filter = others && area.dataset.band !== item.dataset.band ? "saturate(.2)" : "";
      });
      item.addEventListener("pointerenter", () => fade(true));
      item.addEventListener("pointerleave", () => fade(false));
    }
    // Native title tooltips would cover the tip.
    for (const title of svg.querySelectorAll("path[data-band] > title")) title.remove();
  };

  for (const report of document.querySelectorAll(".lowtide-report:not([data-live])")) {
    report.dataset.live = "yes";
    report.querySelectorAll("figure.lt-stack").forEach(addCursor);
  }
})();
