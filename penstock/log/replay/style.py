"""The style sheet of HTML reports: light and dark, from a phone's width up."""

CSS = """
:root{--page:#f7f7f5;--card:#fff;--ink:#1c1e21;--soft:#62676e;--line:#e2e3e0;--recorded:#3565c4;--replayed:#d9730d;
--good:#1f7a45;--bad:#b3261e;--warn:#8a6100;--goodbg:#e4f3ea;--badbg:#fbe6e4;--warnbg:#fbf1d9}
@media (prefers-color-scheme:dark){:root{--page:#131519;--card:#1c1f25;--ink:#e8e9eb;--soft:#9aa0a8;--line:#31353d;
--recorded:#7ea6f4;--replayed:#f0a04b;--good:#6fcf97;--bad:#f2938c;--warn:#e6c06a;--goodbg:#1b3226;--badbg:#3d2220;
--warnbg:#3a3120}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 20px 64px}
code,.ids,td{font-variant-numeric:tabular-nums}
code,.ids,.text{font-family:ui-monospace,"SF Mono","DejaVu Sans Mono",Menlo,monospace;font-size:13px}
.kind{margin:0;color:var(--soft);font-size:13px;letter-spacing:.06em;text-transform:uppercase}
h1{margin:4px 0 6px;font-size:30px;line-height:1.2;font-weight:650}
h1.good{color:var(--good)}h1.bad{color:var(--bad)}
h2{margin:0 0 12px;font-size:19px;font-weight:650}
h3{margin:0;font-size:14px;font-weight:500;overflow-wrap:anywhere}
section{margin-top:36px}
.where{margin:0;color:var(--soft);overflow-wrap:anywhere}
.chips{display:flex;flex-wrap:wrap;gap:8px;margin:14px 0 0;padding:0;list-style:none}
.chips li{padding:2px 10px;border:1px solid var(--line);border-radius:99px;background:var(--card);font-size:13px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:24px}
.tile,figure,.card{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile{padding:14px 16px}
.tile b{display:block;font-size:22px;font-weight:650;white-space:nowrap}
.tile span{color:var(--soft);font-size:13px}
.tile.same b{color:var(--good)}.tile.recovered b{color:var(--warn)}
.tile.tokens b,.tile.finish b,.tile.error b,.tile.unanswered b{color:var(--bad)}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(320px,100%),1fr));gap:14px}
figure{margin:0;padding:14px 16px}
figcaption{font-weight:600;margin-bottom:4px}
.none{color:var(--soft)}
svg{display:block;width:100%;height:auto}
.grid{stroke:var(--line);stroke-width:1}
.tick{fill:var(--soft);font-size:11px}
polyline{fill:none;stroke-width:2.2;stroke-linejoin:round}
polyline.recorded{stroke:var(--recorded)}polyline.replayed{stroke:var(--replayed);stroke-dasharray:7 3}
circle.recorded{fill:var(--recorded)}circle.replayed{fill:var(--replayed)}
.legend{margin:-6px 0 10px;color:var(--soft);font-size:13px}
.legend i{display:inline-block;width:22px;border-top:3px solid var(--recorded);vertical-align:middle;margin-right:6px}
.legend i.replayed{border-top:3px dashed var(--replayed);margin-left:14px}
table{border-collapse:collapse;width:100%;font-size:13px}
th{text-align:left;font-weight:500;color:var(--soft)}
td,th{padding:4px 10px 4px 0;vertical-align:top}
figure td,figure th{text-align:right}figure th:first-child{text-align:left}
.cards{display:grid;gap:12px}
.card{padding:14px 16px}
.card p{margin:4px 0}
.again{color:var(--soft);font-size:13px;overflow-wrap:anywhere}
.badge{padding:1px 9px;border-radius:99px;font-size:12px;font-weight:600;background:var(--badbg);color:var(--bad)}
.badge.same{background:var(--goodbg);color:var(--good)}
.badge.recovered{background:var(--warnbg);color:var(--warn)}
.sides{margin-top:8px}
.sides th{width:80px}
.text{white-space:pre-wrap;overflow-wrap:anywhere}
.before,.ids{color:var(--soft)}
mark{color:inherit;background:none;border-bottom:2px solid}
mark.recorded{color:var(--recorded)}mark.replayed{color:var(--replayed)}
.wide{overflow-x:auto}
.routes td,.requests td{border-top:1px solid var(--line);white-space:nowrap}
.bar{width:34%;min-width:90px}
.bar i{display:block;height:12px;margin-top:4px;border-radius:3px;background:var(--recorded)}
.bar.moved i{background:var(--replayed)}
summary{cursor:pointer}summary h2{display:inline}summary span{color:var(--soft)}
"""
