"""The fork server of asynchronous saves imports this: SIGTERM does not end it. See `writer`."""

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
