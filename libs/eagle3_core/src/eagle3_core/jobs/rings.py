"""What a ring on the broker looks like: the one thing that API and workers must agree on besides HTTP.

A ring says that a queue has work, and names the unit that made it say so. It carries no work and no truth, so a ring
that is lost, doubled, late or forged moves nothing: whoever hears it asks the API. Every setting below was measured
against Celery 5.7 with Redis:

- late acknowledgement runs a task again as soon as the visibility timeout is over (4 starts of one task with 5 s), and
  with a long timeout strands the rings of a killed worker; a ring that is taken without any acknowledgement does
  neither, and what a killed worker took along is rung again by the API;
- without prefetch a worker that is busy for ten hours leaves the rings in the queue to those that are free;
- results are never stored: the database knows how a unit ended.
"""

from __future__ import annotations

from typing import Any, Final

TASK: Final = "aerie.ring"
"""Name of the one task. Its only argument is `stage_run_id`."""

PREFIX: Final = "aerie:"
"""Default prefix of every key on the broker, so that one Redis may serve several houses."""

VISIBILITY_TIMEOUT_S: Final = 3600
CONNECT_TIMEOUT_S: Final = 3.0
ANSWER_TIMEOUT_S: Final = 5.0
"""After so long without an answer a broker counts as away. Longer than the 1 s for which a worker's read blocks."""


def celery_settings(prefix: str = PREFIX) -> dict[str, Any]:
    """The Celery configuration of both ends; `prefix` is what the operator calls this house on the broker."""
    transport = {
        "visibility_timeout": VISIBILITY_TIMEOUT_S,
        "global_keyprefix": prefix,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": ANSWER_TIMEOUT_S,
        "socket_keepalive": True,
        "max_retries": 0,
    }
    return {
        "accept_content": ["json"],
        "task_serializer": "json",
        "task_acks_late": False,
        "task_reject_on_worker_lost": False,
        "task_ignore_result": True,
        "result_backend": None,
        "worker_disable_prefetch": True,
        "worker_prefetch_multiplier": 1,
        "worker_max_tasks_per_child": None,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_enable_remote_control": False,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "broker_connection_retry": True,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_transport_options": transport,
        # Celery takes the shortest of three, wherever it is set.
        "result_backend_transport_options": {"visibility_timeout": VISIBILITY_TIMEOUT_S},
        "visibility_timeout": VISIBILITY_TIMEOUT_S,
    }
