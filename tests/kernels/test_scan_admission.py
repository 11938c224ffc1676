import admission
import pytest

pytestmark = pytest.mark.slow

test_mamba3_scan = admission.suite("mamba3_scan")
test_m2rnn = admission.suite("m2rnn")
