"""Small MuJoCo envs, each showing one kind of hidden state; importing this package registers them with Gymnasium.

Not part of the wheel. `gym.make("simckpt/Sleep-v0")` works from the root of the repository after `import envs`.
"""

import gymnasium as gym

MAX_EPISODE_STEPS = 100  # [env steps]

ENTRY_POINTS = {
    "simckpt/ModelAtReset-v0": "envs.model_at_reset:ModelAtResetEnv",
    "simckpt/ModelMidEpisode-v0": "envs.model_mid_episode:ModelMidEpisodeEnv",
    "simckpt/MocapSwitch-v0": "envs.mocap_switch:MocapSwitchEnv",
    "simckpt/ActuatorDelay-v0": "envs.actuator_delay:ActuatorDelayEnv",
    "simckpt/Sleep-v0": "envs.sleep:SleepEnv",
    "simckpt/SpringYield-v0": "envs.spring_yield:SpringYieldEnv",
    "simckpt/IpcFlex-v0": "envs.ipc_flex:IpcFlexEnv",
    "simckpt/ControlCallback-v0": "envs.control_callback:ControlCallbackEnv",
    "simckpt/ControlClosure-v0": "envs.control_callback:ControlCallbackEnv",
    "simckpt/HiddenPython-v0": "envs.hidden_python:HiddenPythonEnv",
    "simckpt/DictSpace-v0": "envs.dict_space:DictSpaceEnv",
    "simckpt/TorchState-v0": "envs.torch_state:TorchStateEnv",
    "simckpt/Image-v0": "envs.image:ImageEnv",
    "simckpt/GlobalRandom-v0": "envs.global_random:GlobalRandomEnv",
    "simckpt/OwnStateDict-v0": "envs.uncapturable:OwnStateDictEnv",
    "simckpt/OpenSocket-v0": "envs.uncapturable:OpenSocketEnv",
    "simckpt/PythonGenerator-v0": "envs.uncapturable:PythonGeneratorEnv",
    "simckpt/CartPoleInTheLoop-v0": "envs.cart_pole_in_the_loop:CartPoleInTheLoopEnv",
}
KWARGS = {"simckpt/ControlClosure-v0": {"closure": True}}
UNCAPTURABLE = frozenset({"simckpt/OpenSocket-v0", "simckpt/PythonGenerator-v0"})

for _id, _entry_point in ENTRY_POINTS.items():
    gym.register(_id, _entry_point, max_episode_steps=MAX_EPISODE_STEPS, kwargs=KWARGS.get(_id, {}))
