#include "profiler/report_json.h"

namespace fsdpp::profiler {

/// The page itself, drawn anew for each rank that the reader picks.
const char* report_script_page() noexcept {
  return R"js(
const D=JSON.parse(document.getElementById('data').textContent);
const card=(title,note,cls,...kids)=>h('section',{class:'card '+(cls||''),id:title.toLowerCase().replace(/[^a-z]+/g,'-')},h('h2',null,title),note?h('p',{class:'note'},note):null,kids);
const kpi=(id,value,label,hot)=>h('div',{class:'kpi'+(hot?' hot':'')},h('b',{id},value),h('span',null,label));
const empty=text=>h('div',{class:'empty'},text);
const th=(...names)=>h('tr',null,names.map(n=>h('th',{class:n.startsWith('#')?'num':null},n.replace('#',''))));

function kpis(r){const n=Math.max(r.steps.length,1),w=r.split.window_ms||1e-9,x=r.split;
 const step=r.steps.length?r.steps.reduce((a,b)=>a+b.window_ms,0)/n:x.window_ms;
 return h('div',{class:'kpis'},kpi('kpi-step',ms(step),r.steps.length?'a step, mean of '+r.steps.length:'window, no steps marked'),
  kpi('kpi-compute',pct(100*x.compute_ms/w),'of the time in compute'),
  kpi('kpi-exposed',ms(x.exposed_ms/n),'exposed communication a step · '+pct(100*x.exposed_ms/w),x.exposed_ms>.05*w),
  kpi('kpi-overlap',x.overlap===null?'–':pct(100*x.overlap),'of communication overlapped'),
  kpi('kpi-idle',ms(x.idle_ms/n),'device idle a step · '+pct(100*x.idle_ms/w),x.idle_ms>.1*w),
  kpi('kpi-loader',ms(r.loader.total_ms/n),'waiting for the data loader a step'+(r.loader.total_ms>0?' · '+pct(100*(r.loader.starved_ms||0)/r.loader.total_ms)+' of it while it prepared':'')),
  kpi('kpi-peak',r.memory.peak.total?bytes(r.memory.peak.total):'–','peak memory'))}

function audit(r){const a=r.audit,bad=a.errors.length>0,c=a.counts;
 const odd=Object.entries(c).filter(([k,v])=>v!==0&&!['launches','kernels','graph launches','graph kernels','calls without operator','clock shift ns'].includes(k));
 const warn=odd.length>0||a.notes.length>0;
 return h('section',{class:'card audit'+(bad?' bad':warn?' warn':''),id:'audit'},
  h('h2',null,bad?'Audit: this trace can\u2019t be trusted':warn?'Audit: complete except for what is listed':'Audit: nothing is missing'),
  h('div',null,c.launches===0&&c.kernels===0?'No device was traced.':digits(c.launches,0)+' launches · '+digits(c.kernels,0)+' kernels'+(c['graph kernels']?' ('+digits(c['graph kernels'],0)+' from graphs)':'')+' · '+digits(c['dropped records'],0)+' dropped records'),
  bad||warn?h('ul',null,a.errors.map(t=>h('li',null,h('b',null,t))),odd.map(([k,v])=>h('li',null,k+': '+digits(v,0))),a.notes.map(t=>h('li',null,t))):null,
  Object.keys(a.overhead_ms).length?h('div',{class:'sub'},'Overheads: '+Object.entries(a.overhead_ms).map(([k,v])=>k+' '+ms(v)).join(' · ')):null)}

function where(r){const x=r.split,parts=[['compute',x.compute_ms,color('compute')],['exposed communication',x.exposed_ms,color('exposed')],['copy',x.copy_ms,color('copy')]];
 const known=x.exposed_ms;for(const[k,v]of Object.entries(r.idle)){if(k==='copy')continue;const t=k==='communication'?v-known:v;
  if(t>1e-9)parts.push([k==='communication'?'idle: host collective':'idle: '+k,t,k==='communication'?'#f08a5d':color(k)])}
 const rows=r.steps.slice(0,24).map(st=>h('tr',null,h('td',{class:'num'},'step '+st.step),h('td',{style:'width:75%'},stack([['compute',st.compute_ms,color('compute')],
  ['exposed communication',st.exposed_ms,color('exposed')],['copy',st.copy_ms,color('copy')],['idle',st.idle_ms,color('idle')]],st.window_ms,14)),h('td',{class:'num'},ms(st.window_ms))));
 return card('Where the time went','Each instant counts once: compute, else exposed communication, else copy, else idle with its cause.','',
  stack(parts,x.window_ms,30),legend(parts,x.window_ms),r.steps.length>1?h('table',{style:'margin-top:12px'},rows):null)}

function timeline(r){const order=['compute','communication','copy'],l=r.timeline.lanes;
 const names=order.filter(n=>l[n]).concat(Object.keys(l).filter(n=>!order.includes(n)&&n!=='idle: communication'));
 return card('Timeline','How much of each moment of the window each thing fills. Communication: strong where it is exposed, pale where compute hides it.','',strips(names.map(n=>n==='communication'?[n,[[l[n],'var(--hidden)'],[l['idle: communication']||[],'var(--exposed)']]]:[n,[[l[n],color(n.replace('idle: ',''))]]]),r.timeline.columns,r.timeline.steps,r.window_ms||1e-9))}

function communication(r){const units=r.units.slice(0,24),rest=r.units.slice(24),sum=rest.reduce((a,u)=>a+u.exposed_ms,0);
 return card('Exposed communication per unit','Strong: nothing else ran meanwhile, so it made the step longer. Pale: hidden behind compute. Sum exposed: '+ms(r.split.exposed_ms)+'.','half',
  units.length?unitBars(units):empty('No communication in this window.'),rest.length?h('div',{class:'sub'},rest.length+' more units: '+ms(sum)):null)}

function roof(r){if(!D.ceilings)return card('Roofline',null,'half',empty('The roofs of this device are not known. Give measured ones to the report.'));
 const some=r.kernels.some(k=>k.roofline);
 return card('Roofline','Roofs: '+D.ceilings.origin+'. Size: total time.','half',some?roofline(r.kernels,D.ceilings):empty('No kernel has both FLOPs and bytes. Record shapes and FLOPs, or allow counters.'))}

const TONE={'memory-bound':'m','memory-leaning':'m','cache-bound':'m','compute-bound':'c','compute-leaning':'c','launch-bound':'x','wait-bound':'x','latency-bound':'l'};
function kernels(r){return card(r.device<0?'Top operators':'Top kernels',(r.device<0?'No kernel ran on a device: operators of the host by their own time. ':'')+[r.source.text,...(r.source.notes||[])].join('; ')+'.','',h('div',{class:'scroll'},h('table',{id:'kernel-table'},
 th(r.device<0?'operator':'kernel','#total','#calls','#mean','#compute','#memory','verdict'),r.kernels.map(k=>h('tr',null,
  h('td',{class:'name'},h('span',{class:'mono'},k.name),k.op?h('div',{class:'sub'},k.op):null),
  h('td',{class:'num'},ms(k.total_ms),h('span',{class:'bar'},h('i',{style:'width:'+(100*k.share).toFixed(1)+'%'+(k.communication?';background:var(--exposed)':'')}))),
  h('td',{class:'num'},digits(k.count,0)),h('td',{class:'num'},digits(k.mean_us,1)+' µs'),
  h('td',{class:'num'},pct(k.compute_percent)),h('td',{class:'num'},pct(k.memory_percent)),
  h('td',null,h('span',{class:'pill '+(TONE[k.bound]||'')},k.bound),' ',h('span',{class:'sub'},k.source),k.bound==='unknown'?null:h('div',{class:'sub'},k.fix)))))))}

function memory(r){const m=r.memory;if(!m.points.length)return card('Memory over time',null,'',empty('Allocations were not recorded (profile_memory).'));
 return card('Memory over time','By category; the dashed line is the peak, '+bytes(m.peak.total)+' at '+ms(m.peak.at_ms)+'.','',areas(m),
  h('div',{class:'legend'},m.categories.filter(c=>m.peak.by_category[c]>0).map(c=>h('span',null,h('i',{style:'background:'+shade(c)}),c+' ',h('b',null,bytes(m.peak.by_category[c]))))),
  h('table',{style:'margin-top:10px'},th('at the peak','category','#bytes','#blocks'),m.owners.map(o=>h('tr',null,h('td',{class:'name'},o.owner),h('td',null,o.category),h('td',{class:'num'},bytes(o.bytes)),h('td',{class:'num'},digits(o.blocks,0)))),
   m.bytes_before>0?h('tr',null,h('td',null,'(before the window)'),h('td',null,'other'),h('td',{class:'num'},bytes(m.bytes_before)),h('td')):null))}

function host(r){const g=r.gaps;return card('The host',digits(g.count,0)+' gaps in which the host was late, '+ms(g.total_ms)+' in all. Launch queue: at most '+digits(r.queue.max_depth,0)+' deep, '+digits(r.queue.mean_depth,1)+' on average; full '+digits(r.queue.full_count,0)+' times, '+ms(r.queue.full_ms)+'.',
  D.stragglers.length?'half':'',g.longest.length?h('table',null,th('longest gaps: launched by','kernel','#at','#gap'),g.longest.slice(0,8).map(x=>h('tr',null,h('td',{class:'name'},x.op||'–'),h('td',{class:'name mono'},x.kernel||'–'),h('td',{class:'num'},ms(x.at_ms)),h('td',{class:'num'},ms(x.ms))))):empty('The host was never late.'))}

function stragglers(){return D.stragglers.length?card('Stragglers','Time that ranks waited inside a collective for the one that came last.','half',h('table',null,th('unit','collective','#calls','#waited','#for rank'),
 D.stragglers.slice(0,10).map(x=>h('tr',null,h('td',{class:'name'},x.label),h('td',null,x.op),h('td',{class:'num'},digits(x.calls,0)),h('td',{class:'num'},ms(x.wait_ms)),h('td',{class:'num'},x.rank))))):null}

function draw(index){const r=D.ranks[index];document.getElementById('page').replaceChildren(...[kpis(r),audit(r),where(r),timeline(r),communication(r),roof(r),kernels(r),memory(r),host(r),stragglers()].filter(x=>x))}
const pick=h('select',{'aria-label':'rank'},D.ranks.map((r,i)=>h('option',{value:i},'rank '+r.rank+(r.host?' · '+r.host:''))));
pick.addEventListener('change',()=>draw(Number(pick.value)));
document.title=D.title;
document.body.append(h('main',null,h('header',null,h('h1',null,D.title),h('span',{class:'chip'},D.device),h('span',{class:'chip'},D.world_size+(D.world_size===1?' rank':' ranks')),
 h('span',{class:'chip'},D.summary.steps+' steps'),Object.entries(D.metadata).slice(0,6).map(([k,v])=>h('span',{class:'chip'},k+' '+v)),D.ranks.length>1?pick:null),
 h('div',{class:'grid',id:'page'}),h('footer',null,'fsdpp report, format '+D.version+'. The same content as JSON lies beside this file.')),tip);
draw(0);
)js";
}

}  // namespace fsdpp::profiler
