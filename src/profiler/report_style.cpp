#include "profiler/report_json.h"

namespace fsdpp::profiler {

const char* report_style() noexcept {
  return R"css(
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1b2430;--soft:#5b6776;--line:#dfe4ea;--track:#edf0f4;
--compute:#2f6fde;--exposed:#e0492f;--hidden:#f3b49b;--copy:#0f9d8a;--idle:#9aa5b1;--good:#18794e;--warn:#9a6700;--bad:#c02a1c;
--goodbg:#e3f6ec;--warnbg:#fff4d6;--badbg:#fde8e5;--pill:#e8edf5}
@media(prefers-color-scheme:dark){:root{--bg:#11151b;--card:#1a2029;--ink:#e7ecf2;--soft:#9aa7b6;--line:#2c3541;--track:#242c37;
--compute:#5b93f5;--exposed:#ff7a5c;--hidden:#7d4a3d;--copy:#2cc5af;--idle:#6b7785;--good:#5fd39a;--warn:#f0c04f;--bad:#ff8a7a;
--goodbg:#14301f;--warnbg:#352a0c;--badbg:#3b1a16;--pill:#28323f}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1240px;margin:0 auto;padding:24px 20px 56px}
header{display:flex;flex-wrap:wrap;align-items:center;gap:8px 16px;margin-bottom:18px}
h1{font-size:22px;margin:0;font-weight:650;overflow-wrap:anywhere}
h2{font-size:15px;margin:0 0 3px;font-weight:650}
p.note{margin:0 0 12px;color:var(--soft);font-size:12.5px}
.chip{background:var(--pill);border-radius:99px;padding:2px 10px;font-size:12px;color:var(--soft);white-space:nowrap}
select{font:inherit;font-size:13px;padding:3px 8px;border-radius:8px;border:1px solid var(--line);background:var(--card);color:var(--ink);margin-left:auto}
.grid{display:grid;gap:16px;grid-template-columns:repeat(12,minmax(0,1fr))}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:16px 18px;grid-column:span 12;min-width:0}
.half{grid-column:span 6}
@media(max-width:900px){.half{grid-column:span 12}}
.kpis{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));grid-column:span 12}
.kpi{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:12px 16px}
.kpi b{display:block;font-size:22px;font-weight:650;font-variant-numeric:tabular-nums;line-height:1.25}
.kpi span{color:var(--soft);font-size:12px}
.kpi.hot b{color:var(--exposed)}
.audit{display:grid;gap:6px;border-left:5px solid var(--good);background:var(--goodbg)}
.audit.warn{border-left-color:var(--warn);background:var(--warnbg)}
.audit.bad{border-left-color:var(--bad);background:var(--badbg)}
.audit ul{margin:0;padding-left:18px}
.audit li{overflow-wrap:anywhere}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin-top:8px;font-size:12.5px;color:var(--soft)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.legend b{color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px}
th{font-weight:600;text-align:left;color:var(--soft);font-size:12px;border-bottom:1px solid var(--line);padding:4px 8px;white-space:nowrap}
td{padding:6px 8px;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.name{max-width:380px;overflow-wrap:anywhere}
#kernel-table .name{min-width:300px}#kernel-table td:last-child{min-width:300px}
.mono{font:12px/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.sub{color:var(--soft);font-size:12px}
.pill{display:inline-block;border-radius:99px;padding:1px 9px;font-size:12px;background:var(--pill);white-space:nowrap}
.pill.m{background:var(--copy);color:#fff}.pill.c{background:var(--compute);color:#fff}.pill.x{background:var(--exposed);color:#fff}
.pill.l{background:var(--warnbg);color:var(--warn)}
@media(prefers-color-scheme:dark){.pill.m,.pill.c,.pill.x{color:#10151b}}
.bar{display:block;height:6px;border-radius:3px;background:var(--track);margin-top:4px;overflow:hidden;min-width:60px}
.bar i{display:block;height:100%;background:var(--compute)}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--soft);font-size:11px;font-family:inherit}
svg text.ink{fill:var(--ink)}
svg .axis{stroke:var(--line);stroke-width:1;fill:none}
svg .roof{stroke:var(--ink);stroke-width:2;fill:none;stroke-linejoin:round}
svg .dot{stroke:var(--card);stroke-width:1.5;cursor:default}
.empty{color:var(--soft);padding:10px 0}
#tip{position:fixed;z-index:9;pointer-events:none;background:var(--ink);color:var(--bg);padding:5px 9px;border-radius:7px;font-size:12px;
max-width:380px;overflow-wrap:anywhere;white-space:pre-line;opacity:0}
footer{margin-top:22px;color:var(--soft);font-size:12px}
@media print{body{background:#fff}.card,.kpi{break-inside:avoid}select{display:none}}
)css";
}

}  // namespace fsdpp::profiler
