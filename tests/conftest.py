"""What holds for all tests."""

import signal

from hypothesis import HealthCheck, settings

# A busy host is no reason to fail: speed is the benches' matter.
settings.register_profile("any host", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any host")

# Under nohup, or in a shell's background, what the tests start would inherit signals that are ignored.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
