"""This deployment's Celery settings: whatever stands here wins over `keepstep.tasks.config`.

A worker takes the `celeryconfig` of the folder it runs in. The broker, the database and the graphs are Keepstep's own
settings (KEEPSTEP_BROKER, KEEPSTEP_DATABASE, KEEPSTEP_GRAPHS, or keepstep.toml). Queues, acknowledgements, retries and
results are Keepstep's protocol: leave them.
"""

# A child is replaced after this many nudges, which bounds what a leak in a node's libraries can cost.
worker_max_tasks_per_child = 20_000

# How long SIGQUIT, or SIGTERM with REMAP_SIGTERM=SIGQUIT, lets running nodes go on before they are ended. What is
# ended is due again at once, on another worker, and counts as nobody's failure.
worker_soft_shutdown_timeout = 10.0
