// What the page says, in English, and in Chinese where the browser's language is Chinese.
const EN = {
  title: "headway chat", newChat: "New chat", chats: "Conversations", search: "Search conversations", rename: "Rename", remove: "Delete",
  sureRemove: "Delete?", exportOne: "Export this conversation", exportAll: "Export all", importFile: "Import", settings: "Settings",
  theme: "Light or dark", model: "Model", second: "Second model", compare: "Compare two models", system: "System prompt",
  systemHint: "What the model should know or how it should answer", temperature: "Temperature", topP: "Top p", topK: "Top k",
  maxTokens: "Most tokens of an answer", seed: "Seed", usual: "default", reset: "Reset to defaults", message: "Message",
  writeHere: "Write a message", send: "Send", stop: "Stop", attach: "Attach a file", attachImage: "Attach a picture", attachAudio: "Attach a sound",
  detach: "Remove {name}", edit: "Edit", save: "Send again", cancel: "Cancel", copy: "Copy", copied: "Copied", retry: "Try again",
  regenerate: "Answer again", earlier: "Previous version", later: "Next version", versions: "{at} of {of}", you: "You", toEnd: "To the newest",
  answering: "{model} is answering", answered: "{model} has answered", stopped: "stopped", cutLength: "reached the limit of tokens",
  cutContext: "the context is full", tokens: "{n} tokens", rate: "{n} tokens/s", first: "first after {n}", cached: "{n} from cache",
  cache: "cache {used}", cacheOf: "cache {used} / {budget}", running: "{n} running", waiting: "{n} waiting", thinking: "Thinking",
  leftOut: "The context is full: the {n} oldest turns were left out.", leftOutOne: "The context is full: the oldest turn was left out.",
  token: "Access token", signIn: "Sign in", needToken: "This server needs a token: the value of HEADWAY_SERVE_TOKEN where it was started.",
  wrongToken: "The server does not take this token.", offline: "The server does not answer.", cutOff: "The connection ended before the answer was complete.",
  notJson: "{name} is not a conversation that was exported here, nor a list of messages.", imported: "{n} imported.", tooLarge: "{name} has {size}; at most {most} can be sent.",
  notTaken: "{model} does not take {name}.", noStore: "This browser keeps nothing for this page: conversations are lost on refresh.",
  noModels: "The server has no model.", noTemplate: "{model} has no chat template, so it was not trained on conversations.", gone: "The server has no model {model} any more.",
  hello: "Ask {model} something.", helloHint: "Enter sends, Shift+Enter starts a new line, Esc stops an answer.", context: "context of {n} tokens",
  masks: "sparse heads", menu: "List of conversations", close: "Close", untitled: "New chat", empty: "The answer is empty.", code: "code", conversation: "Conversation",
};

const ZH = {
  title: "headway 对话", newChat: "新对话", chats: "对话列表", search: "搜索对话", rename: "重命名", remove: "删除",
  sureRemove: "确定删除？", exportOne: "导出此对话", exportAll: "全部导出", importFile: "导入", settings: "设置",
  theme: "浅色或深色", model: "模型", second: "第二个模型", compare: "对比两个模型", system: "系统提示词",
  systemHint: "模型应当了解什么、如何回答", temperature: "温度", topP: "Top p", topK: "Top k",
  maxTokens: "回答的最多 token 数", seed: "随机种子", usual: "默认", reset: "恢复默认", message: "消息",
  writeHere: "输入消息", send: "发送", stop: "停止", attach: "添加文件", attachImage: "添加图片", attachAudio: "添加音频",
  detach: "移除 {name}", edit: "编辑", save: "重新发送", cancel: "取消", copy: "复制", copied: "已复制", retry: "重试",
  regenerate: "重新回答", earlier: "上一个版本", later: "下一个版本", versions: "{at} / {of}", you: "你", toEnd: "回到最新",
  answering: "{model} 正在回答", answered: "{model} 回答完毕", stopped: "已停止", cutLength: "达到 token 上限",
  cutContext: "上下文已满", tokens: "{n} 个 token", rate: "{n} token/秒", first: "首个 token {n}", cached: "{n} 个来自缓存",
  cache: "缓存 {used}", cacheOf: "缓存 {used} / {budget}", running: "{n} 个进行中", waiting: "{n} 个等待中", thinking: "思考过程",
  leftOut: "上下文已满：最早的 {n} 轮未发送。", leftOutOne: "上下文已满：最早的一轮未发送。",
  token: "访问令牌", signIn: "登录", needToken: "此服务器需要令牌：启动服务器时 HEADWAY_SERVE_TOKEN 的值。",
  wrongToken: "服务器不接受此令牌。", offline: "服务器没有响应。", cutOff: "连接在回答完成之前中断。",
  notJson: "{name} 既不是从这里导出的对话，也不是消息列表。", imported: "已导入 {n} 个。", tooLarge: "{name} 大小为 {size}，最多可发送 {most}。",
  notTaken: "{model} 不支持 {name}。", noStore: "浏览器不为此页面保存数据：刷新后对话会丢失。",
  noModels: "服务器没有模型。", noTemplate: "{model} 没有对话模板，说明它没有在对话上训练过。", gone: "服务器上已没有模型 {model}。",
  hello: "向 {model} 提问吧。", helloHint: "Enter 发送，Shift+Enter 换行，Esc 停止回答。", context: "上下文 {n} 个 token",
  masks: "稀疏注意力头", menu: "对话列表", close: "关闭", untitled: "新对话", empty: "回答为空。", code: "代码", conversation: "对话",
};

export const DICTIONARIES = { en: EN, zh: ZH };

export const language = () => (typeof navigator !== "undefined" && /^zh\b/i.test(navigator.language || "") ? "zh" : "en");

export const say = (key, values = {}) => {
  const text = DICTIONARIES[language()][key] ?? EN[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
};
