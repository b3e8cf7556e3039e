"""The style of a report, light and dark, on screens and paper, and the few lines of script beside Vega's."""

from __future__ import annotations

_LIGHT = """
  color-scheme: light; --paper: #ffffff; --panel: #f5f7f9; --ink: #1b232b; --muted: #52606d; --rule: #d5dce2;
  --link: #0b5cab; --warn: #8a3b00; --warn-paper: #fff4e5; --c0: #0b62a8; --c1: #b8500a; --c2: #1b7a4b; --c3: #8a3fa0;
  --c4: #a3272f; --c5: #5f6b76; --c6: #806400; --c7: #00737f;
"""
_DARK = """
  color-scheme: dark; --paper: #12171c; --panel: #1b2229; --ink: #e6ebf0; --muted: #a7b3bf; --rule: #38434d;
  --link: #7cbcff; --warn: #ffc48a; --warn-paper: #3a2a17; --c0: #6cb6ff; --c1: #f0a05a; --c2: #5fd39a; --c3: #d49bf0;
  --c4: #ff8f8f; --c5: #a9b6c2; --c6: #e0c04a; --c7: #56cbd6;
"""
STYLE = f"""
:root {{{_LIGHT}}}
@media screen and (prefers-color-scheme: dark) {{ :root {{{_DARK}}} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1rem 1.25rem 4rem; max-width: 1120px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: 1rem 0 .25rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--rule);
  overflow-wrap: anywhere; }}
h3 {{ font-size: 1.05rem; margin: 1.75rem 0 .4rem; }} h4 {{ font-size: .95rem; margin: 1rem 0 .25rem; }}
p {{ margin: .4rem 0; max-width: 75ch; overflow-wrap: anywhere; }} a {{ color: var(--link); }}
.note, figcaption {{ color: var(--muted); font-size: .875rem; }}
.warning {{ border-left: 4px solid var(--warn); background: var(--warn-paper); padding: .5rem .8rem; margin: .6rem 0; }}
nav ul {{ display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; padding: 0; margin: .6rem 0; list-style: none; }}
nav a {{ display: inline-block; padding: .3rem 0; overflow-wrap: anywhere; }}
.skip {{ position: absolute; left: -999rem; }} .skip:focus {{ left: 1rem; top: .5rem; background: var(--paper); }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 1rem; }}
figure {{ margin: 0; padding: .8rem; background: var(--panel); border: 1px solid var(--rule); border-radius: 8px;
  min-width: 0; break-inside: avoid; }}
figure.wide {{ grid-column: 1 / -1; margin-top: .6rem; }} figure h3, figure h4 {{ margin: 0; font-size: 1rem; }}
.chart {{ width: 100%; margin: .5rem 0; touch-action: pan-y; }}
.chart svg {{ display: block; max-width: 100%; height: auto; }}
.legend {{ display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; margin: .2rem 0 .5rem; padding: 0; list-style: none;
  font-size: .85rem; }}
.legend li {{ overflow-wrap: anywhere; min-width: 0; }} .legend svg {{ vertical-align: middle; }}
.zoom {{ display: flex; gap: .4rem; }} .zoom[hidden] {{ display: none; }}
button {{ font: inherit; font-size: .85rem; color: var(--ink); background: var(--paper); border: 1px solid var(--muted);
  border-radius: 5px; padding: .2rem .65rem; min-height: 2rem; cursor: pointer; }}
:focus-visible {{ outline: 3px solid var(--link); outline-offset: 2px; }}
summary {{ cursor: pointer; padding: .35rem 0; }} details.part > summary {{ font-size: 1.05rem; font-weight: 600; }}
summary h3 {{ display: inline; margin: 0; }} details.part {{ margin-top: 1.1rem; }}

.scroll {{ overflow-x: auto; max-height: 34rem; margin: .5rem 0; }}
table {{ border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; color: var(--muted); padding: .25rem 0; }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--rule); }}
thead th {{ color: var(--muted); font-weight: 600; white-space: nowrap; }} tbody th {{ font-weight: 500; }}
table.words tbody th, table.words td:nth-child(2) {{ white-space: nowrap; }}
td {{ overflow-wrap: anywhere; }}
table.figures td, table.figures thead th:not(:first-child) {{ text-align: right; white-space: nowrap; }}
.overview table {{ width: auto; min-width: min(100%, 26rem); }}
.differences table {{ width: auto; }} .differences table.words td:nth-child(2) {{ white-space: normal; }}
dl {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: .1rem 1.5rem; }}
dl > div {{ border-bottom: 1px solid var(--rule); padding: .3rem 0; }}
dt {{ color: var(--muted); font-size: .8rem; }} dd {{ margin: 0; overflow-wrap: anywhere; }}
pre {{ background: var(--panel); border: 1px solid var(--rule); border-radius: 6px; padding: .5rem .7rem;
  margin: .3rem 0; overflow-x: auto; font: .85rem/1.5 ui-monospace, monospace; }}
#vg-tooltip-element {{ position: fixed; z-index: 9; visibility: hidden; pointer-events: none; max-width: 24rem;
  background: var(--paper); color: var(--ink); border: 1px solid var(--muted); border-radius: 6px; padding: .4rem .6rem;
  font: 13px/1.4 system-ui, sans-serif; overflow-wrap: anywhere; }}
#vg-tooltip-element.visible {{ visibility: visible; }} #vg-tooltip-element td {{ border: 0; padding: 0 .5rem 0 0; }}
@media print {{
  body {{ max-width: none; padding: 0; font-size: 10pt; }} .zoom, nav, .skip {{ display: none; }}
  .scroll {{ overflow: visible; max-height: none; }} pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
  h2, h3, h4, summary {{ break-after: avoid; }} figure details, .hint {{ display: none; }}
  tr {{ break-inside: avoid; }} figure {{ background: none; }}
  .charts {{ grid-template-columns: 1fr 1fr; }}
  table.figures td, table.figures thead th, table.words th, table.words td {{ white-space: normal; }}
  table {{ font-size: 8pt; table-layout: auto; }} th, td {{ padding-right: .4rem; overflow-wrap: anywhere; }}
}}
"""

SCRIPT = """
(function () {
  "use strict";
  var specs = JSON.parse(document.getElementById("charts").textContent);
  function draw(figure) {
    var spec = specs[figure.id], place = figure.querySelector(".chart");
    if (!spec || figure.dataset.drawn) return;
    figure.dataset.drawn = "yes";
    spec.width = "container";
    vegaEmbed(place, spec, {
      renderer: "svg", actions: false, ast: true, tooltip: { disableDefaultStyle: true },
      loader: { load: function () { return Promise.reject(new Error("a report loads nothing")); } }
    }).then(function (result) {
      var view = result.view, buttons = figure.querySelector(".zoom");
      if (!buttons) return;
      var name = "zoom_" + buttons.dataset.field;
      buttons.hidden = false;
      buttons.addEventListener("click", function (event) {
        var act = event.target.dataset.act;
        if (!act) return;
        var domain = view.scale("x").domain().map(Number), middle = (domain[0] + domain[1]) / 2;
        var half = (domain[1] - domain[0]) / 2 * (act === "in" ? 0.5 : 2);
        view.signal(name, act === "all" ? null : [middle - half, middle + half]).runAsync();
      });
    }).catch(function (error) { console.error(figure.id, error); });
  }
  // A chart in a folded part has no width yet.
  var seen = new IntersectionObserver(function (entries) {
    entries.filter(function (entry) { return entry.isIntersecting; }).forEach(function (entry) {
      seen.unobserve(entry.target);
      draw(entry.target);
    });
  }, { rootMargin: "400px" });
  document.querySelectorAll("figure.drawn").forEach(function (figure) { seen.observe(figure); });
  addEventListener("beforeprint", function () {
    document.querySelectorAll("details.part").forEach(function (part) { part.open = true; });
  });
  document.querySelectorAll("[data-fold]").forEach(function (button) {
    button.hidden = false;
    button.addEventListener("click", function () {
      var isOpen = button.dataset.fold === "open";
      document.querySelectorAll("details.part").forEach(function (part) { part.open = isOpen; });
    });
  });
})();
"""
