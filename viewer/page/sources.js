// What was opened: runs, evaluations, single files; which of their files is the newest, and what its page is called.

/** By step; of one step the training file, which the evaluation of that step follows. */
export function newestFile(source) {
  const weight = (file) => 2 * (file.step ?? 0) + (file.kind === "train" ? 1 : 0);
  return source.files.reduce((best, file) => (best === null || weight(file) > weight(best) ? file : best), null);
}

export function sourceOf(site, id) {
  return site.sources.find((source) => source.id === id);
}

/** "step 12", "evaluation at step 30", or the file's own name. */
export function fileTitle(file) {
  if (file.step === null || file.kind === "other") return file.name;
  return file.kind === "eval" ? `evaluation at step ${file.step}` : `step ${file.step}`;
}
