"""The look of a report: light or dark by the reader's system, no web fonts."""

from __future__ import annotations

CSS = """
:root{color-scheme:light dark;--ink:#1b2430;--soft:#66717f;--line:#e3e8ee;--card:#fff;--page:#f5f7fa;--c0:#2f6fed;--c1:#e5782b;
--c2:#2a9d5c;--bad:#c0392b}
@media (prefers-color-scheme:dark){:root{--ink:#e6ebf2;--soft:#93a0b0;--line:#2c3644;--card:#1a212c;--page:#11161e;--c0:#6c9dff;
--c1:#f29a5b;--c2:#55c98a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI","PingFang SC","Noto Sans CJK SC","Microsoft YaHei",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 20px 60px}
h1{margin:0;font-size:26px;letter-spacing:-.01em}h2{margin:36px 0 12px;font-size:17px}
.sub{color:var(--soft);margin:4px 0 22px}
.badge{font-size:12px;font-weight:600;padding:3px 10px;border-radius:99px;background:var(--c2);color:#fff;vertical-align:middle;
margin-left:10px}
.badge.failed{background:var(--bad)}.badge.stopped,.badge.running,.badge.planned{background:var(--c1)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:12px}
.tile,figure,.panel{background:var(--card);border:1px solid var(--line);border-radius:12px}
.tile{padding:12px 16px}.tile b{display:block;font-size:18px;white-space:nowrap;font-weight:650;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:12.5px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:16px;margin-top:16px}
.charts.one{grid-template-columns:1fr}
figure{margin:0;padding:14px 16px 6px}figcaption{font-weight:600;font-size:14px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:11.5px}text.y{text-anchor:end}
text.x{text-anchor:middle}
.grid{stroke:var(--line)}polyline{fill:none;stroke-width:1.9;stroke-linejoin:round}polyline.faint{stroke-width:1;opacity:.32}
.c0{stroke:var(--c0)}.c1{stroke:var(--c1)}.c2{stroke:var(--c2)}.dot.c0{fill:var(--c0)}.dot.c1{fill:var(--c1)}
.dot.c2{fill:var(--c2)}
.key{float:right;margin-left:16px;font-weight:400;color:var(--soft);font-size:12.5px}.key::before{content:"";display:inline-block;
width:12px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle}
.k0::before{background:var(--c0)}.k1::before{background:var(--c1)}.k2::before{background:var(--c2)}
.panel{padding:6px 18px;overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:14px}
td,th{padding:7px 14px 7px 0;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
tr:last-child td{border-bottom:0}
th{color:var(--soft);font-weight:500;font-size:12.5px}td:first-child{color:var(--soft);white-space:nowrap}td.num{text-align:right;
font-variant-numeric:tabular-nums}
.wide td{white-space:pre-wrap;overflow-wrap:anywhere;color:var(--ink)}.wide td:first-child{white-space:pre-wrap;min-width:140px}
ul{padding-left:20px;margin:12px 0}details summary{cursor:pointer;padding:8px 0;color:var(--soft)}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:16px;align-items:start}
@media (max-width:560px){.charts,.two{grid-template-columns:1fr}}
"""
