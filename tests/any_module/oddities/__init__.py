"""One small module an oddity, by name: what strangers' modules do that a flat engine may not expect."""

from tests.any_module.case import by_name
from tests.any_module.oddities.flow import FLOW
from tests.any_module.oddities.late_reads import LATE_READS
from tests.any_module.oddities.parameters import PARAMETERS
from tests.any_module.oddities.people import PEOPLE
from tests.any_module.oddities.training import TRAINING

ODDITIES = by_name([*PARAMETERS, *FLOW, *LATE_READS, *TRAINING, *PEOPLE])
