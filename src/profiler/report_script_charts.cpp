#include "profiler/report_json.h"

namespace fsdpp::profiler {

/// Building blocks: elements, numbers, charts. Names from the trace only ever become text nodes.
const char* report_script_charts() noexcept {
  return R"js(
'use strict';
const NS='http://www.w3.org/2000/svg';
function make(e,attrs,kids){for(const k in attrs||{})if(attrs[k]!==undefined&&attrs[k]!==null)e.setAttribute(k,attrs[k]);
 for(const c of kids.flat(9))if(c!==null&&c!==undefined&&c!==false)e.append(c instanceof Node?c:String(c));return e}
const h=(tag,attrs,...kids)=>make(document.createElement(tag),attrs,kids);
const s=(tag,attrs,...kids)=>make(document.createElementNS(NS,tag),attrs,kids);
const digits=(x,n)=>x.toLocaleString('en-US',{minimumFractionDigits:n,maximumFractionDigits:n});
const ms=x=>x===null||x===undefined?'–':x===0?'0 ms':digits(x,Math.abs(x)<10?3:Math.abs(x)<100?2:1)+' ms';
const pct=x=>x===null||x===undefined?'–':digits(x,1)+' %';
function scaled(x,unit,base,names){let i=0;while(Math.abs(x)>=base&&i<names.length-1){x/=base;i++}
 return digits(x,i===0&&unit==='B'?0:Math.abs(x)<10?2:Math.abs(x)<100?1:0)+' '+names[i]+unit}
const bytes=x=>scaled(x,'B',1024,['','Ki','Mi','Gi','Ti']);
const rate=(x,unit)=>scaled(x,unit,1000,['','K','M','G','T','P']);
const COLORS={compute:'var(--compute)',exposed:'var(--exposed)',hidden:'var(--hidden)',copy:'var(--copy)','communication':'var(--exposed)',
 'data loader':'#b07cd8','launch-bound':'#e2a32b','synchronisation':'#d4679d','queue full':'#8c6d46','allocation':'#6f9c3d','module loading':'#4f8f9f',
 'profiler':'#7f7fb8','dispatch':'#9aa5b1','other':'#c3cad2',
 parameters:'#2f6fde',gradients:'#e0492f',gathered:'#e2a32b',activations:'#0f9d8a',optimizer:'#b07cd8'};
const color=name=>COLORS[name]||'var(--idle)';
const shade=name=>name==='other'?'var(--idle)':color(name);

const tip=h('div',{id:'tip'});
function hover(el,text){el.addEventListener('mousemove',e=>{tip.textContent=text;tip.style.opacity=1;
 const w=tip.offsetWidth,x=e.clientX+14+w>innerWidth?e.clientX-w-10:e.clientX+14;tip.style.left=x+'px';tip.style.top=(e.clientY+14)+'px'});
 el.addEventListener('mouseleave',()=>{tip.style.opacity=0});return el}

/* One stacked bar: parts [[label,value,color]]. */
function stack(parts,total,height){let x=0;const g=[];
 for(const[label,v,c]of parts){if(!(v>0)||!(total>0))continue;const w=1000*v/total;
  g.push(hover(s('rect',{x,y:0,width:Math.max(w,.6),height,fill:c}),label+': '+ms(v)+' ('+pct(100*v/total)+')'));x+=w}
 return s('svg',{viewBox:'0 0 1000 '+height,preserveAspectRatio:'none',style:'height:'+height+'px;border-radius:6px;overflow:hidden;background:var(--track)',role:'img'},g)}
function legend(parts,total){return h('div',{class:'legend'},parts.filter(p=>p[1]>0).map(([label,v,c])=>
 h('span',null,h('i',{style:'background:'+c}),label+' ',h('b',null,ms(v)),total?' · '+pct(100*v/total):'')))}

/* Strips over time: lanes [[label,[[thousandths,color],…]]], later layers on top. */
function strips(lanes,columns,steps,window){const left=128,wide=1060,high=20,gap=5,top=16;const g=[];
 for(const st of steps){const x=left+wide*st.at_ms/window;g.push(s('line',{x1:x,x2:x,y1:top-4,y2:top+lanes.length*(high+gap),class:'axis'}),
  s('text',{x:x+3,y:10},'step '+st.step))}
 lanes.forEach(([label,layers],row)=>{const y=top+row*(high+gap),w=wide/columns;
  g.push(s('text',{x:left-10,y:y+14,'text-anchor':'end',class:'ink'},label),s('rect',{x:left,y,width:wide,height:high,fill:'var(--track)',rx:3}));
  for(const[values,c]of layers){let d='';for(let i=0;i<values.length;i++)if(values[i]>0){const t=high*values[i]/1000,x=left+i*w;
   d+='M'+x.toFixed(2)+' '+(y+high)+'v'+(-t).toFixed(2)+'h'+(w+.15).toFixed(2)+'v'+t.toFixed(2)+'z'}
  g.push(s('path',{d,fill:c}))}});
 const bottom=top+lanes.length*(high+gap);
 for(let i=0;i<=6;i++){const x=left+wide*i/6;g.push(s('line',{x1:x,x2:x,y1:bottom,y2:bottom+4,class:'axis'}),
  s('text',{x,y:bottom+16,'text-anchor':i===6?'end':i?'middle':'start'},digits(window*i/6,window<60?2:0)+' ms'))}
 return s('svg',{viewBox:'0 0 1200 '+(bottom+20),role:'img'},g)}

/* Horizontal bars of communication: exposed on top of total. */
function unitBars(units){const top=Math.max(...units.map(u=>u.total_ms),1e-9),left=190,wide=250,row=24;
 return s('svg',{viewBox:'0 0 560 '+(units.length*row+4),role:'img'},units.map((u,i)=>{const y=i*row+3;
  const name=u.unit.length>28?'…'+u.unit.slice(-27):u.unit,total=wide*u.total_ms/top,open=wide*u.exposed_ms/top;
  const text=u.unit+'\nexposed '+ms(u.exposed_ms)+' of '+ms(u.total_ms)+'\n'+Object.entries(u.exposed_by_op).map(([k,v])=>k+' '+ms(v)).join('\n');
  return hover(s('g',null,s('rect',{x:0,y:y-2,width:560,height:row,fill:'transparent'}),s('text',{x:left-10,y:y+13,'text-anchor':'end',class:'ink'},name),
   s('rect',{x:left,y,width:Math.max(total,1),height:16,rx:3,fill:'var(--hidden)'}),s('rect',{x:left,y,width:open,height:16,rx:3,fill:'var(--exposed)'}),
   s('text',{x:left+total+8,y:y+13,class:'ink'},ms(u.exposed_ms))),text)}))}

/* Log-log roofline. */
function roofline(kernels,roofs){const W=560,H=330,L=58,R=14,T=14,B=40;const pts=kernels.filter(k=>k.roofline);
 const xs=pts.map(k=>k.roofline.intensity).concat(roofs.ridge),ys=pts.map(k=>k.roofline.flops_per_s).concat(roofs.flops_per_s);
 const x0=Math.min(0,Math.floor(Math.log10(Math.min(...xs)/2))),x1=Math.max(4,Math.ceil(Math.log10(Math.max(...xs)*2))),y1=Math.log10(roofs.flops_per_s*2.2),
  y0=Math.min(Math.floor(Math.log10(Math.min(...ys)/1.5)),Math.floor(y1)-2);
 const X=v=>L+(W-L-R)*(Math.log10(v)-x0)/(x1-x0),Y=v=>H-B-(H-T-B)*(Math.log10(v)-y0)/(y1-y0);const g=[];
 for(let e=x0;e<=x1;e++){const x=X(10**e);g.push(s('line',{x1:x,x2:x,y1:T,y2:H-B,class:'axis'}),s('text',{x,y:H-B+15,'text-anchor':'middle'},e<0?String(10**e):(10**e).toLocaleString('en-US')))}
 for(let e=y0;e<=y1-.1;e++){const y=Y(10**e);g.push(s('line',{x1:L,x2:W-R,y1:y,y2:y,class:'axis'}),s('text',{x:L-6,y:y+4,'text-anchor':'end'},rate(10**e,'').replace('.00','')))}
 const low=Math.max(10**x0,10**y0/roofs.bytes_per_s);
 g.push(s('path',{class:'roof',d:'M'+X(low)+' '+Y(low*roofs.bytes_per_s)+'L'+X(roofs.ridge)+' '+Y(roofs.flops_per_s)+'L'+(W-R)+' '+Y(roofs.flops_per_s)}),
  s('text',{x:W-R,y:Y(roofs.flops_per_s)-6,'text-anchor':'end',class:'ink'},rate(roofs.flops_per_s,'FLOP/s')),
  s('line',{x1:X(roofs.ridge),x2:X(roofs.ridge),y1:Y(roofs.flops_per_s),y2:H-B,stroke:'var(--soft)','stroke-dasharray':'3 3'}),
  s('text',{x:X(roofs.ridge)+5,y:H-B-7},'ridge '+digits(roofs.ridge,0)),
  (()=>{const v=Math.sqrt(low*roofs.ridge),x=X(v),y=Y(v*roofs.bytes_per_s),a=-Math.atan2(Y(low*roofs.bytes_per_s)-Y(roofs.flops_per_s),X(roofs.ridge)-X(low))*180/Math.PI;
   return s('text',{x,y:y-7,'text-anchor':'middle',class:'ink',transform:'rotate('+a+' '+x+' '+y+')'},rate(roofs.bytes_per_s,'B/s'))})(),
  s('text',{x:(L+W-R)/2,y:H-6,'text-anchor':'middle'},'FLOP per byte of DRAM'),s('text',{x:-(T+H-B)/2,y:12,'text-anchor':'middle',transform:'rotate(-90)'},'FLOP/s'));
 const most=Math.max(...pts.map(k=>k.total_ms),1e-9);
 for(const k of[...pts].sort((a,b)=>b.total_ms-a.total_ms)){const r=k.roofline;
  g.push(hover(s('circle',{class:'dot',cx:X(r.intensity),cy:Y(r.flops_per_s),r:4+9*Math.sqrt(k.total_ms/most),'fill-opacity':.85,fill:r.memory_side?'var(--copy)':'var(--compute)'}),
   k.name+'\n'+rate(r.flops_per_s,'FLOP/s')+' at '+digits(r.intensity,2)+' FLOP/B\n'+pct(100*r.fraction)+' of its roof · '+ms(k.total_ms)+'\n'+k.source))}
 return s('svg',{viewBox:'0 0 '+W+' '+H,role:'img'},g)}

/* Stacked areas of memory. */
function areas(memory){const W=1200,H=250,L=66,R=12,T=14,B=26,P=memory.points;const end=Math.max(P[P.length-1][0],P[0][0]+1e-9),first=P[0][0];
 const peak=memory.peak.total||1,X=t=>L+(W-L-R)*(t-first)/(end-first),Y=v=>H-B-(H-T-B)*v/(peak*1.08);const g=[];
 for(let i=0;i<=4;i++){const v=peak*i/4,y=Y(v);g.push(s('line',{x1:L,x2:W-R,y1:y,y2:y,class:'axis'}),s('text',{x:L-6,y:y+4,'text-anchor':'end'},bytes(v)))}
 const base=P.map(()=>0);
 memory.categories.forEach((name,c)=>{if(!P.some(p=>p[c+1]>0))return;let d='',back='';
  P.forEach((p,i)=>{const x=X(p[0]).toFixed(2),next=(i+1<P.length?X(P[i+1][0]):W-R).toFixed(2),lowY=Y(base[i]).toFixed(2);base[i]+=Math.max(p[c+1],0);const y=Y(base[i]).toFixed(2);
   d+=(i?'L':'M')+x+' '+y+'L'+next+' '+y;back='L'+next+' '+lowY+'L'+x+' '+lowY+back});
  g.push(hover(s('path',{d:d+back+'z',fill:shade(name),'fill-opacity':.9}),name+': '+bytes(memory.peak.by_category[name])+' at the peak'))});
 const x=X(memory.peak.at_ms),right=x>W*.8;
 g.push(s('line',{x1:x,x2:x,y1:T,y2:H-B,stroke:'var(--ink)','stroke-dasharray':'3 3'}),s('text',{x:x+(right?-6:6),y:T+2,'text-anchor':right?'end':'start',class:'ink'},'peak '+bytes(peak)));
 for(let i=0;i<=6;i++){const t=first+(end-first)*i/6;g.push(s('text',{x:X(t),y:H-8,'text-anchor':i===6?'end':i?'middle':'start'},digits(t,end-first<60?2:0)+' ms'))}
 return s('svg',{viewBox:'0 0 '+W+' '+H,role:'img'},g)}
)js";
}

}  // namespace fsdpp::profiler
