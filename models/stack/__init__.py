"""Train many networks of one architecture at once: their parameters are the rows of one tensor, a stack.

    groups = [form_group(spec, learners, device=None) for spec in group_learners(learners)]
    for task in groups[0].train(rows=range(len(groups[0].indices)), repeats=1):
        task()      # tasks are independent: `Workers(threads).run(tasks)` runs them in parallel

The results equal those of a loop over the learners, up to rounding.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
