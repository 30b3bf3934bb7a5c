"""State in plastic deformation: a joint spring that stays bent (MuJoCo 4.0, `mjData.plastic`)."""

from envs.base import SmallEnv


class SpringYieldEnv(SmallEnv):
    """A sprung pendulum that yields when pushed too far, so that its rest angle is the past's."""

    xml = """
    <mujoco>
      <option timestep="0.005"/>
      <worldbody>
        <body pos="0 0 1">
          <joint name="hinge" axis="0 1 0" damping="0.1" stiffness="4" springyield="0.2"/>
          <geom type="capsule" size="0.05" fromto="0 0 0 0 0 -0.5"/>
        </body>
      </worldbody>
      <actuator><motor joint="hinge" gear="4"/></actuator>
    </mujoco>
    """
