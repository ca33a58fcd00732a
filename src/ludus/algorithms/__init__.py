"""Pure tensor functions: advantages, losses, aggregation, KL, corrections, filters; presets by name.

An algorithm is data (`algorithm.Algorithm`); no function takes a model. `import ludus.algorithms` also imports the
submodules, but torch only on the first call of a function.
"""

from ludus.algorithms import advantages as advantages
from ludus.algorithms import corrections as corrections
from ludus.algorithms import filters as filters
from ludus.algorithms import kl as kl
from ludus.algorithms import losses as losses
from ludus.algorithms import preference as preference
from ludus.algorithms import shaping as shaping
from ludus.algorithms.objective import aggregate as aggregate
