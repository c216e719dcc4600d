import sys
from pathlib import Path
from podium.settings import load_settings
from podium.accelerators import find_accelerator
from podium.plan.calibration import load_chip
from podium.plan.compiled.compile import compile_phases
from podium.plan.planner import make_jobs
from podium.plan.request.phase_sizes import Planned
from podium.hlo.cost import roofline
from podium.plan.planned_device import Device
from podium.hlo import cost as C
import dataclasses
sets=sys.argv[3:]
cfg=load_settings([Path(sys.argv[1])], sets, {}).config
acc=find_accelerator(sys.argv[2])
planned=Planned.of(cfg,acc)
progs={"update:24x1408":1.0} if acc.name=='v6e-8' else {sys.argv[3]:1.0}
comp=compile_phases(make_jobs(planned,progs),at_once=1)
chip=load_chip('v6e')
for name,c in comp.items():
    cost=c.cost(1.0, 0.4)
    r=roofline(cost,chip.peaks,links=acc.ici_links if acc.torus else chip.links)
    print(name, r, 'links', acc.ici_links, acc.torus, c.parts)
    links=acc.ici_links
    rows=[]
    for w in cost.works:
        for t in w.transfers:
            s=C._seconds(t,chip.peaks,links); d=C._doing(t.beside or (0,0,0),chip.peaks)
            rows.append((w.times*max(0,s-d)*(not t.overlaps), w.times*s, t.overlaps, t.kind, getattr(t,'axes',None), w.times, t.sent/1e6, w.name, w.source))
    rows.sort(key=lambda x:-x[1])
    for x in rows[:25]: print(tuple(round(y,5) if isinstance(y,float) else y for y in x))
    print('waited', sum(x[0] for x in rows), 'all', sum(x[1] for x in rows), 'overlapping', sum(x[1] for x in rows if x[2]))
    tot=[]
    for w in cost.works:
        m,v=w.seconds(chip.peaks); tot.append((w.times*max(m,v), 'c' if m>v else 'h', w.times, w.name[:90], w.flops/1e9, w.hbm_bytes/1e6))
    tot.sort(key=lambda x:-x[0])
    for x in tot[:25]: print(tuple(round(y,5) if isinstance(y,float) else y for y in x))
