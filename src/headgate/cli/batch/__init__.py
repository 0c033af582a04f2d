"""`headgate map` below its command line: a function over every record of a file, resumable and in constant memory.

    source -> book -> runner -> book -> output
              who is next       what is done, and where it is written

`sources` reads records. A runner calls the function: `lanes` in this process, `pooled` through a TaskPool with keys,
workers or fairness. `book` knows which records are open and done, and gathers what is to be written. `flow` stands
between them, and writes in groups. `output` has the files, and a `journal` that says how far everything is, so that the
same command goes on after any end. `resuming` decides what a changed function or input means. `job` puts these
together. Pure are `book`, `journal`, `ids` and `meter`.
"""
