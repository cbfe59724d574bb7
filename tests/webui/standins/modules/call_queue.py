"""One at a time; the queue is not reentrant."""

import threading

queue_lock = threading.Lock()


def wrap_queued_call(func):
    def queued(*args, **kwargs):
        if not queue_lock.acquire(timeout=0.1):
            raise AssertionError("deadlock: queued from within the queue")
        try:
            return func(*args, **kwargs)
        finally:
            queue_lock.release()

    return queued
