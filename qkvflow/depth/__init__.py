"""How do we travel from t = 0 to t = 1? Solvers, grids and integration; independent of weights and blocks."""

from qkvflow.depth.config import DepthConfig as DepthConfig
from qkvflow.depth.early import integrate_until_exit as integrate_until_exit
from qkvflow.depth.fixed import FixedPlan as FixedPlan
from qkvflow.depth.general import AdaptivePlan as AdaptivePlan
from qkvflow.depth.general import BacksolvePlan as BacksolvePlan
from qkvflow.depth.grid import StepGrid as StepGrid
from qkvflow.depth.plan import AbstractPlan as AbstractPlan
from qkvflow.depth.plan import Solution as Solution
from qkvflow.depth.plan import Statistics as Statistics
from qkvflow.depth.schedule import StepGrowth as StepGrowth
from qkvflow.depth.schedule import StepRange as StepRange
from qkvflow.depth.solvers import RK4 as RK4
from qkvflow.depth.solvers import SOLVERS as SOLVERS
from qkvflow.depth.solvers import Tableau as Tableau
from qkvflow.depth.solvers import solver_by_name as solver_by_name
from qkvflow.depth.solvers import tableau as tableau
from qkvflow.depth.steps import increment as increment
from qkvflow.depth.stepwise import integrate_with_memory as integrate_with_memory
