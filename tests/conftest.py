"""What holds for all tests."""

import signal

from hypothesis import HealthCheck, settings

# A busy host is no reason to fail: speed is the benches' matter. What a commit is judged by is the same in each run;
# `make test-all` looks at new examples every time.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True)
settings.load_profile("same")

# Under nohup, or in a shell's background, what the tests start would inherit signals that are ignored.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
